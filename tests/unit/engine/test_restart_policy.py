"""When a dead child is started again, and when a silent one is taken for dead: both without a child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from inferq.engine import RestartPolicy
from inferq.engine.restart import RestartBudget
from inferq.engine.watchdog import Watchdog

POLICY = RestartPolicy(max_restarts=4, window_seconds=100, backoff_seconds=1, max_backoff_seconds=3)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_fruitless_deaths_wait_longer_each_time_up_to_the_bound_and_then_there_is_no_more() -> None:
    budget = RestartBudget(POLICY, Clock())
    assert [budget.after_death(fruitful=False) for _ in range(5)] == [1, 2, 3, 3, None]


def test_a_death_after_some_tokens_is_started_again_at_once_and_begins_the_count_anew() -> None:
    budget = RestartBudget(POLICY, Clock())
    for _ in range(10):
        assert [budget.after_death(fruitful=False) for _ in range(4)] == [1, 2, 3, 3]
        assert budget.after_death(fruitful=True) == 0


def test_deaths_before_the_window_are_forgotten() -> None:
    clock = Clock()
    budget = RestartBudget(POLICY, clock)
    for _ in range(20):
        assert budget.after_death(fruitful=False) is not None
        clock.now += 30


def test_without_restarts_the_first_death_is_the_last() -> None:
    for fruitful in (False, True):
        assert RestartBudget(RestartPolicy(max_restarts=0)).after_death(fruitful=fruitful) is None


def test_no_number_of_restarts_is_too_large_for_the_arithmetic() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=10_000), Clock())
    assert [budget.after_death(fruitful=False) for _ in range(2000)][-1] == 30


@pytest.mark.parametrize(
    "fields",
    [
        {"max_restarts": -1},
        {"window_seconds": 0},
        {"step_timeout_seconds": 0},
        {"step_timeout_seconds": float("nan")},
        {"backoff_seconds": -1},
        {"backoff_seconds": 31},
    ],
)
def test_a_policy_out_of_its_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        RestartPolicy(**fields)


class Turns:
    """In the place of `asyncio.sleep`: each turn ends at once, and `hears` says whether something came in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hears: Callable[[int], bool]) -> None:
        self.slept: list[float] = []
        self.asked = 0
        self._hears = hears
        self.dog = Watchdog(100, self._ask)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self._hears(len(self.slept)):
            self.dog.heard()

    def _ask(self) -> None:
        self.asked += 1


async def test_a_silence_of_the_timeout_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, lambda turn: False)
    await turns.dog.run()
    assert turns.slept == [25] * 5
    assert turns.asked == 5


async def test_whoever_says_something_within_the_timeout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, lambda turn: turn % 4 == 0 and turn <= 400)
    await turns.dog.run()
    assert len(turns.slept) == 400 + 4
