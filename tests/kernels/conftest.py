"""Tests of the Triton kernels under Triton's interpreter, on numpy, so that they need no GPU.

Triton reads TRITON_INTERPRET once, when it is imported. So only a process that was started with TRITON_INTERPRET=1
runs these files; the suite starts one for them (tests/unit/cuda/test_interpreted_kernels.py). One file by hand:

    TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/kernels/test_norm.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parent
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises UsageError where this folder or files of it were asked for by name, which no ignoring stops."""
    if INTERPRETED or config.option.collectonly:
        return
    if session.isinitpath(FOLDER) or any(item.path.is_relative_to(FOLDER) for item in items):
        arguments = " ".join(config.invocation_params.args)
        raise pytest.UsageError(
            "the kernels' tests run under Triton's interpreter: "
            f"TRITON_INTERPRET=1 {os.path.relpath(sys.executable)} -m pytest {arguments}"
        )
