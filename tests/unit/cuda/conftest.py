"""Fixtures for the tests that compile kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.compiled import fresh_cache


@pytest.fixture(scope="module")
def fresh_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Triton compiles goes to a folder of this module's own, and nothing comes from another one."""
    with fresh_cache(tmp_path_factory.mktemp("triton")):
        yield
