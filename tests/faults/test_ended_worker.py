"""SIGTERM in mid-stream, and what may go wrong on the way out."""

from __future__ import annotations

import signal

import pytest
from support.disturbed import Answers, Disturbance, Fleet, fault
from support.processes import all_gone


@pytest.mark.timeout(600)
@fault
async def test_sigterm_moves_what_does_not_end_in_time_and_costs_no_attempt(steady: Fleet, answers: Answers) -> None:
    leaving = await steady.only("--drain-seconds", "0.5")
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin()
        await streams.until(100)
        family = leaving.family()
        leaving.send(signal.SIGTERM)
        heir = steady.start()
        assert await leaving.wait() == 0
        await all_gone(family, timeout=10)
        await streams.check(answers, heir)
        starts = await streams.starts()
        assert {attempt for attempt, _ in starts} == {1}
        assert any(resumed for _, resumed in starts), "some went on from where they were"
    steady.spare(heir)


@pytest.mark.timeout(600)
@fault
async def test_sigterm_lets_finish_what_fits_into_the_drain(steady: Fleet, answers: Answers) -> None:
    leaving = await steady.only("--drain-seconds", "120")
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin()
        await streams.until(100)
        leaving.send(signal.SIGTERM)
        await streams.check(answers)
        assert await leaving.wait() == 0
        assert len(await streams.starts()) == len(streams.streams)


@pytest.mark.timeout(600)
@fault
async def test_a_kill_during_the_drain_is_a_kill(steady: Fleet, answers: Answers) -> None:
    leaving = await steady.only("--drain-seconds", "120")
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin()
        await streams.until(100)
        family = leaving.family()
        leaving.send(signal.SIGTERM)
        await streams.until(200)
        leaving.send(signal.SIGKILL)
        await all_gone(family, timeout=10)
        heir = await steady.take()
        await streams.check(answers, heir)
    steady.spare(heir)
