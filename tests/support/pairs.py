"""Cases in which each pair of values of any two parameters occurs, in a fraction of the full product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """As few cases as a greedy search finds, the same ones each time.

    A case begins with a pair that no case has yet; each other parameter takes the value that adds the most such pairs,
    of equals the one that is rarest so far. Values are hashable, and different within a parameter.
    """
    settings = [(name, value) for name in values for value in values[name]]
    missing = {frozenset(pair): None for pair in combinations(settings, 2) if pair[0][0] != pair[1][0]}
    used: Counter[tuple[str, Any]] = Counter()
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name in values:
            if name not in case:
                options = [(name, value) for value in values[name]]
                _, case[name] = max(options, key=lambda option: (_added(case, option, missing), -used[option]))
        for pair in combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        used.update(case.items())
        cases.append({name: case[name] for name in values})
    return cases


def as_parameters(core: Sequence[dict[str, Any]], cases: Sequence[dict[str, Any]]) -> list[Any]:
    """What a test is parametrized with: the core runs always, the rest of the cases is slow."""
    rest = [case for case in cases if case not in core]
    return [pytest.param(case, id=_name(case)) for case in core] + [
        pytest.param(case, id=_name(case), marks=pytest.mark.slow) for case in rest
    ]


def _name(case: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}".replace("torch.", "").replace(" ", "") for name, value in case.items())


def _added(case: dict[str, Any], option: tuple[str, Any], missing: dict[frozenset[tuple[str, Any]], None]) -> int:
    return sum(frozenset((setting, option)) in missing for setting in case.items())
