"""kill -9 of a worker at any moment: its streams go on from their next token, whoever takes them; nothing is left."""

from __future__ import annotations

import random
import signal

import pytest
import redis.asyncio
from support.disturbed import Answers, Disturbance, Fleet, fault
from support.processes import all_gone

RUNS = 30


@pytest.mark.timeout(600)
@fault
@pytest.mark.parametrize("run", range(RUNS))
async def test_kill_9_changes_no_answer(run: int, steady: Fleet, answers: Answers, client: redis.asyncio.Redis) -> None:
    """Every third time with 500 short jobs waiting; every other time with another worker there already."""
    moment = random.Random(f"kill {run}")
    worker = await steady.take()
    await steady.retire(worker)
    other = await steady.take() if run % 2 else None
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin(num_waiting=500 if run % 3 == 0 else 0)
        total = sum(len(answers[name].token_ids) for name in streams.names)
        await streams.until(int(moment.uniform(0, 0.95) * total))
        family = worker.family()
        worker.send(signal.SIGKILL)
        heir = other or steady.start()
        await all_gone(family, timeout=10)
        await streams.check(answers, heir)
    steady.spare(heir)


@pytest.mark.timeout(600)
@fault
async def test_one_worker_after_the_other_is_killed(steady: Fleet, answers: Answers) -> None:
    """Each heir goes on where the last one was. What was lost before an heir began costs no attempt."""
    worker = await steady.take()
    await steady.retire(worker)
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin()
        for share in (0.3, 0.6):
            await streams.until(int(share * sum(len(answers[name].token_ids) for name in streams.names)))
            worker.send(signal.SIGKILL)
            worker = steady.start()
        await streams.check(answers, worker)
        assert len(await streams.starts()) > 2 * len(streams.streams), "some were begun three times"
    steady.spare(worker)
