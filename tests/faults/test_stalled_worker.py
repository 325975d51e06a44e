"""A worker is stopped for longer than its lease, and wakes when others have gone on: nobody sees anything of it."""

from __future__ import annotations

import signal

import psutil
import pytest
import redis.asyncio
from support.disturbed import KEYS, PATIENCE_SECONDS, Answers, Disturbance, Fleet, fault, until_empty
from support.streams import events
from support.waiting import wait_until


@pytest.mark.timeout(600)
@fault
@pytest.mark.parametrize("whole_family", [False, True], ids=["worker-alone", "worker-and-engine"])
async def test_sigstop_beyond_the_lease_changes_no_answer(
    whole_family: bool, steady: Fleet, answers: Answers, client: redis.asyncio.Redis
) -> None:
    await steady.retire()
    stalled = await steady.take()
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin()
        await streams.until(100)
        processes = stalled.family() if whole_family else [psutil.Process(stalled.pid)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        heir = await steady.take()
        await streams.check(answers, heir)
        before = [await events(client, KEYS, reading.request_id) for reading in streams.streams]
        for process in processes:
            process.send_signal(signal.SIGCONT)
        await until_empty(client, stalled)
        assert [await events(client, KEYS, reading.request_id) for reading in streams.streams] == before
        assert stalled.process.poll() is None
        assert len(await streams.starts()) > len(streams.streams), "the heir went on with some"
    steady.spare(heir, stalled)


@pytest.mark.timeout(600)
@fault
async def test_a_stalled_worker_that_is_the_only_one_takes_its_streams_again(steady: Fleet, answers: Answers) -> None:
    await steady.retire()
    stalled = await steady.take()
    async with steady.producer() as producer, redis.asyncio.Redis.from_url(steady.url) as client:
        streams = Disturbance(steady, producer)
        await streams.begin()
        await streams.until(100)
        stalled.send(signal.SIGSTOP)

        async def lapsed() -> bool:
            leases = [KEYS.lease(reading.request_id) for reading in streams.streams]
            return not await client.exists(*leases)

        await wait_until(lapsed, timeout=PATIENCE_SECONDS)
        stalled.send(signal.SIGCONT)
        await streams.check(answers, stalled)
    steady.spare(stalled)
