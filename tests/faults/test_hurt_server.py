"""Redis is killed in mid-stream and comes back with all it had acknowledged, or a replica without the tail does.

It may come back at once, or load for longer than a lease.
"""

from __future__ import annotations

import time

import pytest
from support.disturbed import LEASE_SECONDS, Answers, Disturbance, Fleet, fault
from support.processes import WorkerProcess
from support.restarts import RestartableServer
from support.waiting import wait_until


@pytest.mark.timeout(600)
@fault
async def test_kill_9_of_redis_is_a_pause(server: RestartableServer, fleet: Fleet, answers: Answers) -> None:
    worker = await fleet.take()
    async with fleet.producer() as producer:
        streams = Disturbance(fleet, producer)
        await streams.begin(num_waiting=50)
        for num_tokens in (60, 300):
            await streams.until(num_tokens)
            before = _num_losses(worker)
            server.kill()
            await wait_until(lambda before=before: _num_losses(worker) > before)
            server.start()
        await streams.check(answers, worker)
        assert {attempt for attempt, _ in await streams.starts()} == {1}


@pytest.mark.timeout(600)
@fault
async def test_a_replica_without_the_tail_is_given_it_again(
    server: RestartableServer, fleet: Fleet, answers: Answers
) -> None:
    """Readers had tokens that the new primary has never seen: nobody sees one twice, and none is missing."""
    worker = await fleet.take()
    async with fleet.producer() as producer:
        streams = Disturbance(fleet, producer)
        await streams.begin()
        await streams.until(100)
        server.replicate()
        await streams.until(300)
        server.fail_over()
        await streams.check(answers, worker)
        assert {attempt for attempt, _ in await streams.starts()} == {1}


@pytest.mark.timeout(600)
@fault
async def test_ten_seconds_without_an_answer_are_a_pause(
    server: RestartableServer, fleet: Fleet, answers: Answers
) -> None:
    """No connection breaks, and all leases end: their owner, the only worker, takes them again."""
    worker = await fleet.take()
    async with fleet.producer() as producer:
        streams = Disturbance(fleet, producer)
        await streams.begin()
        await streams.until(100)
        server.suspend()
        suspended_at = time.monotonic()
        await wait_until(lambda: time.monotonic() > suspended_at + 10)
        server.resume()
        await streams.check(answers, worker)
        assert {attempt for attempt, _ in await streams.starts()} == {1}


@pytest.mark.timeout(600)
@fault
async def test_a_server_that_is_loading_is_a_pause(server: RestartableServer, fleet: Fleet, answers: Answers) -> None:
    """It answers -LOADING to everything, for longer than a lease, and then has all that it had acknowledged."""
    worker = await fleet.take()
    server.write_much()
    async with fleet.producer() as producer:
        streams = Disturbance(fleet, producer)
        await streams.begin(num_waiting=20)
        await streams.until(100)
        server.kill()
        server.start_loading()
        began_at = time.monotonic()
        await wait_until(lambda: not server.is_loading)
        assert time.monotonic() - began_at > LEASE_SECONDS
        assert server.num_refused("evalsha") > 0, "the worker has asked while it loaded"
        await streams.check(answers, worker)
        assert {attempt for attempt, _ in await streams.starts()} == {1}


def _num_losses(worker: WorkerProcess) -> int:
    return worker.log.count("redis.lost")
