"""Every pair of values is in some case, and the cases are few and always the same."""

from __future__ import annotations

from itertools import combinations

from support.pairs import covering

VALUES = {"color": "rgb", "size": range(5), "plain": (True, False), "depth": (1, None, 2, "4"), "alone": [0]}


def test_every_pair_occurs() -> None:
    cases = covering(**VALUES)
    for one, other in combinations(VALUES, 2):
        pairs = {(case[one], case[other]) for case in cases}
        assert pairs == {(a, b) for a in VALUES[one] for b in VALUES[other]}


def test_cases_are_few_and_repeatable() -> None:
    cases = covering(**VALUES)
    assert len(cases) < 30 < 3 * 5 * 2 * 4
    assert cases == covering(**VALUES)
    assert all(list(case) == list(VALUES) for case in cases)
