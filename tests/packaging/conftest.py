"""The wheel, built once for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.tree import copy_tree


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_tree(tmp_path_factory.mktemp("source") / "inferq")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    (built,) = out.glob("*.whl")
    return built
