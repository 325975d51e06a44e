"""Tests of the Triton kernels under Triton's interpreter, on numpy, so that they need no GPU.

Triton reads TRITON_INTERPRET once, when it is imported. So only a process that was started with TRITON_INTERPRET=1
collects these files; the suite starts one for them (tests/unit/cuda/test_interpreted_kernels.py). One file by hand:

    TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/kernels/test_norm.py
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
