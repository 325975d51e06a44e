"""The engine's child dies of a request, dies of nothing, or hangs for ever: one request ends for it, and no other."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest
import redis.asyncio
from support.disturbed import KEYS, STREAMS, Answers, Disturbance, Fleet, fault, until_empty
from support.processes import WorkerProcess
from support.waiting import wait_until

from inferq.producer import RequestFailed

#: A token that no prompt and no answer of the suite has.
POISON = 48_211
HARMED = {
    "INFERQ_ENGINE_COMMAND": f"{sys.executable} {Path(__file__).with_name('harmed_child.py')}",
    "INFERQ_TEST_POISON": str(POISON),
}


def child_of(worker: WorkerProcess) -> psutil.Process:
    (child,) = psutil.Process(worker.pid).children()
    return child


@pytest.mark.timeout(600)
@fault
@pytest.mark.parametrize("harm", ["dies", "hangs"])
async def test_a_poison_request_ends_alone(
    harm: str, steady: Fleet, answers: Answers, client: redis.asyncio.Redis
) -> None:
    worker = await steady.only("--step-timeout-seconds", "4", environment={**HARMED, "INFERQ_TEST_HARM": harm})
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer, list(STREAMS)[::3])
        await streams.begin()
        await streams.until(20)
        poison = await producer.submit(prompt_token_ids=[*range(100, 120), POISON], sampling={"max_tokens": 4})
        with pytest.raises(RequestFailed, match="engine_crashed"):
            await producer.result(poison)
        (letter,) = await producer.dead_letters()
        assert (letter.request_id, letter.reason) == (poison, "engine_crashed")
        await client.delete(KEYS.dead, f"inferq:{poison}:dead_payload")
        await streams.check(answers, worker)
        assert {attempt for attempt, _ in await streams.starts()} == {1}
    worker.send(signal.SIGTERM)
    assert await worker.wait() == 0


@pytest.mark.timeout(600)
@fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung-for-ever"])
async def test_an_engine_that_dies_or_hangs_of_nothing_changes_no_answer(
    number: signal.Signals, steady: Fleet, answers: Answers, client: redis.asyncio.Redis
) -> None:
    worker = await steady.only("--step-timeout-seconds", "4")
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer, list(STREAMS)[::3])
        await streams.begin()
        await streams.until(50)
        harmed = child_of(worker)
        harmed.send_signal(number)
        await wait_until(lambda: not harmed.is_running() or harmed.status() == psutil.STATUS_ZOMBIE, timeout=60)
        await streams.check(answers, worker)
        assert {attempt for attempt, _ in await streams.starts()} == {1}
        await until_empty(client, worker)
    steady.spare(worker)
