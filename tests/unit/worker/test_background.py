"""Background tasks outlive Redis errors and nothing else; signals and waits; Redis' clock."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from redis.exceptions import ConnectionError, ResponseError
from support.waiting import wait_until

from inferq.worker.background import end, every
from inferq.worker.clock import RedisClock
from inferq.worker.signals import StopSignals, first_of


async def test_an_action_is_repeated_whatever_redis_says() -> None:
    answers = [ConnectionError("x"), OSError("x"), ResponseError("x"), TimeoutError(), None, None]
    done: list[object] = []

    async def action() -> None:
        answer = answers[len(done)] if len(done) < len(answers) else None
        done.append(answer)
        if answer is not None:
            raise answer

    task = asyncio.create_task(every(0.001, action, role="test"))
    await wait_until(lambda: len(done) > 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_fault_of_our_own_is_not_hidden() -> None:
    async def action() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        await every(0.001, action, role="test")


async def test_the_first_signal_asks_and_the_second_hurries() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.asked.wait()
        assert not signals.hurried.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await signals.hurried.wait()


async def test_the_first_of_several_waits_ends_them_all() -> None:
    cancelled: list[str] = []

    async def wait_for_ever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)

    await first_of(asyncio.sleep(0), wait_for_ever("a"), wait_for_ever("b"))
    assert cancelled == ["a", "b"]
    await first_of(wait_for_ever("c"), timeout=0.001)
    assert cancelled == ["a", "b", "c"]


async def test_what_the_first_raises_comes_out() -> None:
    async def fail() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError):
        await first_of(fail(), asyncio.Event().wait())


def test_the_clock_follows_redis_not_this_machine() -> None:
    clock = RedisClock()
    with pytest.raises(RuntimeError):
        clock.now_ms()
    now = time.monotonic()
    clock.measured(now, now, (1_000_000, 500_000))
    assert 0 <= clock.now_ms() - 1_000_000_500 < 10_000
    assert clock.seconds_until(clock.now_ms() + 60_000) == pytest.approx(60, abs=10)
    assert clock.seconds_until(0) < 0


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    """As redis-py does when a cancellation comes right before one of its timeouts."""
    lost: list[bool] = []

    async def work() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(True)

    tasks = [asyncio.create_task(work()), asyncio.create_task(asyncio.sleep(3600))]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await end(tasks)
    assert lost
    assert all(task.cancelled() for task in tasks)
