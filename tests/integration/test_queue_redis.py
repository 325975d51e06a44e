"""The worker and its server: away at the start, restarted while idle, unsuitable; the worker's signs of life."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest
import redis.asyncio
from support.processes import start_worker
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.restarts import restartable_server
from support.servers import valkey
from support.streams import text_of, tokens_of, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import InferenceClient

SLOW = ["--step-ms", "10"]


@pytest.mark.slow
async def test_no_server_at_the_start_is_exit_3_and_one_line(folder: Path) -> None:
    with start_worker(f"unix://{folder}/none.sock") as worker:
        assert await worker.wait(30) == 3
        (line,) = worker.log.splitlines()
        assert line.startswith(f"inferq-worker: Redis cannot be reached at {folder}/none.sock")
        assert "--embedded" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://user:secret@localhost:1/0", "localhost:1 "),
        (
            "redis+sentinel://user:secret@localhost:1,localhost:2/main",
            "'main' that Sentinel names at localhost:1, localhost:2 ",
        ),
    ],
)
async def test_a_server_that_cannot_be_reached_is_named_without_its_password(url: str, place: str) -> None:
    with start_worker(url) as worker:
        assert await worker.wait(30) == 3
        (line,) = worker.log.splitlines()
        assert place in line
        assert "secret" not in line


async def test_decoded_responses_are_refused_at_the_start(redis_url: str) -> None:
    with start_worker(redis_url + "&decode_responses=true") as worker:
        assert await worker.wait(30) == 2
        assert "decode_responses" in worker.log
        assert "Traceback" not in worker.log


async def test_a_policy_that_evicts_jobs_is_warned_of() -> None:
    with valkey("--maxmemory-policy", "allkeys-lru") as url:
        async with scripted_worker(url) as worker:
            (line,) = [json.loads(line) for line in worker.log.splitlines() if "redis.may_evict_jobs" in line]
            assert (line["policy"], line["wanted"], line["level"]) == ("allkeys-lru", "noeviction", "warning")


@pytest.mark.parametrize(("options", "warns"), [((), True), (("--appendonly", "yes"), False)])
async def test_a_server_that_keeps_nothing_is_warned_of(options: tuple[str, ...], warns: bool) -> None:
    with valkey(*options) as url:
        async with scripted_worker(url) as worker:
            assert ("redis.keeps_nothing" in worker.log) == warns


async def test_a_restart_while_idle_is_survived() -> None:
    with restartable_server() as server:
        async with scripted_worker(server.url, "--heartbeat-seconds", "0.3") as worker:
            for number in range(2):
                server.kill()
                await wait_until(lambda number=number: worker.log.count("redis.lost") > number * 3)
                server.start()
                async with InferenceClient.from_url(server.url, model=MODEL) as producer:
                    request_id = await producer.submit(f"after {number}", sampling={"max_tokens": 5})
                    assert (await producer.result(request_id, timeout=20)).text == answer_to(f"after {number}", 5)
            worker.send(signal.SIGTERM)
            assert await worker.wait(20) == 0


async def test_a_full_server_still_ends_what_is_cancelled_late_or_done() -> None:
    """No token of a natural end or a deadline is lost; a cancelled one ends with those that it had published."""
    with valkey("--maxmemory-policy", "noeviction") as url:
        async with scripted_worker(url, "--heartbeat-seconds", "0.3", engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(url) as client,
                InferenceClient.from_url(url, model=MODEL) as producer,
            ):
                await producer.submit("cancelled", request_id="cancelled", sampling=ENDLESS)
                await producer.submit("deadline", request_id="deadline", sampling=ENDLESS, deadline_ms=3000)
                await producer.submit("natural", request_id="natural", sampling={"max_tokens": 80})
                for request_id in ("cancelled", "deadline", "natural"):
                    await until_delta(client, KEYS, request_id)
                await client.config_set("maxmemory", "1")
                await wait_until(lambda: "OutOfMemoryError" in worker.log)
                await producer.cancel("cancelled")
                for request_id, reason in (("cancelled", "cancelled"), ("natural", "length"), ("deadline", "deadline")):
                    events = await until_ended(client, KEYS, request_id)
                    assert events[-1].finish_reasons == (reason,)
                    assert text_of(events) == answer_to(request_id, events[-1].usage.completion_tokens)
                    assert len(tokens_of(events)) == events[-1].usage.completion_tokens
                assert events[-1].usage.completion_tokens > 100
                await client.config_set("maxmemory", "0")
                assert await left_over(client) == set()


async def test_a_full_server_does_not_make_a_worker_look_dead() -> None:
    with valkey("--maxmemory-policy", "noeviction") as url:
        flags = ("--worker-id", "w1", "--heartbeat-seconds", "0.3")
        async with scripted_worker(url, *flags, engine=SLOW), redis.asyncio.Redis.from_url(url) as client:
            await client.config_set("maxmemory", "1")
            since = time.monotonic()
            await wait_until(lambda: time.monotonic() > since + 2)  # its keys live for 0.9 s
            assert await client.exists(KEYS.card, KEYS.worker("w1")) == 2
            assert await client.zrange(KEYS.workers, 0, -1) == [b"w1"]


async def test_one_broken_stream_is_no_outage_for_its_neighbours() -> None:
    with valkey() as url:
        async with (
            scripted_worker(url, engine=SLOW) as worker,
            redis.asyncio.Redis.from_url(url) as client,
            InferenceClient.from_url(url, model=MODEL) as producer,
        ):
            for request_id in ("broken", "neighbour"):
                await producer.submit(request_id, request_id=request_id, sampling={"max_tokens": 150})
                await until_delta(client, KEYS, request_id)
            await client.set(KEYS.events("broken"), "x")
            events = await until_ended(client, KEYS, "neighbour")
            assert text_of(events) == answer_to("neighbour", 150)
            assert (await until_ended(client, KEYS, "broken"))[-1].code == "internal"
            assert "redis.lost" not in worker.log
            assert await left_over(client) == set()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it looks for the handler in /proc")
async def test_a_signal_while_the_start_waits_for_the_server_ends_it(folder: Path) -> None:
    with start_worker(f"unix://{folder}/none.sock") as worker:
        await wait_until(lambda: _catches(worker.pid, signal.SIGTERM))
        worker.send(signal.SIGTERM)
        assert await worker.wait(3) == 0
        assert "cannot be reached" not in worker.log


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(line.split()[1], 16) & 1 << (number - 1))


async def test_what_a_worker_says_of_itself(redis_url: str, client: redis.asyncio.Redis) -> None:
    flags = ("--worker-id", "w1", "--heartbeat-seconds", "0.2", "--max-num-seqs", "3", "--max-backlog", "77")
    async with (
        scripted_worker(redis_url, *flags, engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        await client.zadd(KEYS.workers, {"long-gone": 1})
        request_id = await producer.submit("run", sampling=ENDLESS)
        state = await wait_until(lambda: _state(client, running=1))
        assert (state["worker"], state["model"], state["pid"]) == ("w1", MODEL, worker.pid)
        assert (state["host"], state["slots"], state["tracked"]) == (socket.gethostname(), 3, 1)
        assert state["stats"]["running"] == 1
        seconds, microseconds = await client.time()
        assert 0 <= seconds * 1000 + microseconds / 1000 - state["started_at_ms"] < 60_000
        card = json.loads(await client.get(KEYS.card))
        assert card == {
            "model": MODEL,
            "vocab_size": 259,
            "max_model_len": 32768,
            "max_num_seqs": 3,
            "max_backlog": 77,
            "features": [],
        }
        assert 0 < await client.pttl(KEYS.worker("w1")) <= 600
        assert 0 < await client.pttl(KEYS.card) <= 600
        assert await wait_until(lambda: _members(client, [b"w1"]))
        await producer.cancel(request_id)
        state = await wait_until(lambda: _state(client, running=0))
        assert (state["tracked"], state["stats"]["used_blocks"]) == (0, 0)
    await wait_until(lambda: _gone(client))


async def test_a_worker_that_was_killed_is_told_from_one_that_lives(redis_url: str) -> None:
    """It is silent as soon as a sign of life is overdue, and off the list three periods after its last one."""
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
        scripted_worker(redis_url, "--worker-id", "lives", "--heartbeat-seconds", "0.3"),
    ):
        async with scripted_worker(redis_url, "--worker-id", "killed", "--heartbeat-seconds", "1") as killed:
            assert await wait_until(lambda: _silence(producer, {"lives": False, "killed": False}))
            killed.send(signal.SIGKILL)
        assert await wait_until(lambda: _silence(producer, {"lives": False, "killed": True}))
        assert await wait_until(lambda: _silence(producer, {"lives": False}))


async def _silence(producer: InferenceClient, expected: dict[str, bool]) -> bool:
    """Whether these are the workers that are listed, and those of them are silent."""
    return {each.worker: each.silent for each in (await producer.fleet()).workers} == expected


async def _state(client: redis.asyncio.Redis, *, running: int) -> dict | None:
    state = json.loads(await client.get(KEYS.worker("w1")) or b"{}")
    idle = state.get("stats", {}).get("running") == state.get("running")
    return state if state.get("running") == running and idle else None


async def _members(client: redis.asyncio.Redis, members: list[bytes]) -> bool:
    return await client.zrange(KEYS.workers, 0, -1) == members


async def _gone(client: redis.asyncio.Redis) -> bool:
    """A worker that was killed is off the list by itself, three heartbeats later."""
    return not await client.exists(KEYS.card, KEYS.worker("w1"))
