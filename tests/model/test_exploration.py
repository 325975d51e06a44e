"""Every state of small worlds: what must hold does, and an end stays within reach."""

from __future__ import annotations

import pytest

from model.explore import explore
from model.sizes import SIZES

#: A small run sees so many states of each world, in the order of their distance from the beginning.
SAMPLE = 4_000


def test_half_a_million_states_are_searched() -> None:
    assert sum(size.at_least for size in SIZES.values()) >= 500_000


@pytest.mark.sized
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SIZES)
def test_small_worlds_are_right(name: str, request: pytest.FixtureRequest) -> None:
    size, full = SIZES[name], request.config.getoption("--full")
    search = explore(size.config, max_states=10 * size.at_least if full else SAMPLE)
    assert search.violated is None, search
    assert search.complete or not full, search
    assert search.num_states >= (size.at_least if full else min(size.at_least, SAMPLE)), search
