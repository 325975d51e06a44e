"""What the suites of the examples share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder whose path is short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as name:
        yield Path(name)
