"""How a worker ends, and what it leaves behind: by signal, by kill -9, by a fault of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis.asyncio
from support.processes import all_gone, scripted, start_worker
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.streams import assert_unbroken, events, starts_of, text_of, tokens_of, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import InferenceClient

SLOW = ["--step-ms", "10"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_worker_stops_at_once(
    redis_url: str, client: redis.asyncio.Redis, number: signal.Signals
) -> None:
    async with scripted_worker(redis_url) as worker:
        family = worker.family()
        worker.send(number)
        assert await worker.wait(10) == 0
        await all_gone(family)
        assert await client.zcard(KEYS.workers) == 0
        assert not [key async for key in client.scan_iter("inferq:worker:*")]


async def test_a_stopping_worker_finishes_what_runs_and_takes_nothing_new(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with scripted_worker(redis_url, engine=SLOW) as worker, InferenceClient.from_url(redis_url, model=MODEL) as c:
        running = await c.submit("run", sampling={"max_tokens": 60})
        await until_delta(client, KEYS, running, at_least=5)
        worker.send(signal.SIGTERM)
        await wait_until(lambda: "worker.draining" in worker.log)
        waiting = await c.submit("wait", sampling={"max_tokens": 2})
        assert await worker.wait(30) == 0
        found = await events(client, KEYS, running)
        assert found[-1].finish_reasons == ("length",)
        assert text_of(found) == answer_to("run", 60)
        assert [event.type for event in await events(client, KEYS, waiting)] == ["queued"]
        assert await client.zcard(KEYS.queue) == 1
        await c.cancel(waiting)


async def test_what_does_not_finish_in_time_goes_to_another_worker(redis_url: str, client: redis.asyncio.Redis) -> None:
    """At its old place, with its progress, at no cost. The reader sees one text, and no end of the old worker's."""
    async with (
        scripted_worker(redis_url, "--drain-seconds", "0.3", engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        request_id = await c.submit("run", sampling={"max_tokens": 300})
        waiting = await c.submit("wait", sampling={"max_tokens": 300})
        order = float(await client.hget(KEYS.job(request_id), "order"))
        await until_delta(client, KEYS, waiting, at_least=3)
        worker.send(signal.SIGTERM)
        assert await worker.wait(20) == 0
        assert await client.zcard(KEYS.running) == 0
        assert await client.zrange(KEYS.queue, 0, -1) == [request_id.encode(), waiting.encode()]
        assert await client.zscore(KEYS.queue, request_id) == pytest.approx(order)
        assert not await client.exists(KEYS.lease(request_id))
        before = len(tokens_of(await events(client, KEYS, request_id)))
        async with scripted_worker(redis_url):
            for each, prompt in ((request_id, "run"), (waiting, "wait")):
                found = await until_ended(client, KEYS, each)
                assert_unbroken(found, answer_to(prompt, 300))
                assert [attempt for attempt, _ in starts_of(found)] == [1, 1]
            assert starts_of(await events(client, KEYS, request_id))[1] == (1, before)
            assert await left_over(client) == set()


async def test_sigterm_mid_stream_moves_the_stream_at_once(redis_url: str, client: redis.asyncio.Redis) -> None:
    """With a lease far longer than the test: the other worker need not wait for it."""
    flags = ("--lease-seconds", "300", "--drain-seconds", "0")
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *flags, engine=SLOW) as worker,
    ):
        request_id = await c.submit("move", sampling={"max_tokens": 200})
        result = asyncio.create_task(c.result(request_id))
        await until_delta(client, KEYS, request_id, at_least=10)
        async with scripted_worker(redis_url, *flags):
            worker.send(signal.SIGTERM)
            assert await worker.wait(20) == 0
            assert (await result).text == answer_to("move", 200)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.06, 0.1])
async def test_a_signal_on_the_last_way_changes_no_exit_code(redis_url: str, delay_s: float) -> None:
    async with scripted_worker(redis_url) as worker:
        worker.send(signal.SIGTERM)
        await wait_until(lambda: "worker.stopped" in worker.log)
        await asyncio.sleep(delay_s)
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0


async def test_a_second_signal_hurries(redis_url: str, client: redis.asyncio.Redis) -> None:
    flags = ("--drain-seconds", "3600")
    async with (
        scripted_worker(redis_url, *flags, engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        request_id = await c.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        worker.send(signal.SIGTERM)
        await wait_until(lambda: "worker.draining" in worker.log)
        worker.send(signal.SIGINT)
        assert await worker.wait(20) == 0
        assert [event.type for event in await events(client, KEYS, request_id)].count("failed") == 0
        assert await client.zcard(KEYS.queue) == 1
        await c.cancel(request_id)


async def test_while_it_drains_requests_can_still_be_cancelled(redis_url: str, client: redis.asyncio.Redis) -> None:
    flags = ("--drain-seconds", "3600")
    async with (
        scripted_worker(redis_url, *flags, engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        request_id = await c.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        worker.send(signal.SIGTERM)
        await wait_until(lambda: "worker.draining" in worker.log)
        await c.cancel(request_id)
        assert await worker.wait(20) == 0
        assert (await events(client, KEYS, request_id))[-1].finish_reasons == ("cancelled",)


async def test_a_signal_while_the_model_loads_ends_it(redis_url: str) -> None:
    with start_worker(redis_url, environment=scripted("--load-ms", "600000")) as worker:
        await wait_until(lambda: len(worker.family()) == 2, what="the engine's process has been started")
        family = worker.family()
        worker.send(signal.SIGTERM)
        assert await worker.wait(20) == 0
        await all_gone(family)


async def test_an_engine_that_cannot_load_ends_the_worker(redis_url: str) -> None:
    with start_worker(redis_url, environment=scripted("--fail-load", "no-such-weights")) as worker:
        assert await worker.wait(30) == 1
        assert "no-such-weights" in worker.log


async def test_kill_9_leaves_no_process(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with scripted_worker(redis_url, engine=SLOW) as worker, InferenceClient.from_url(redis_url, model=MODEL) as c:
        request_id = await c.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        family = worker.family()
        assert len(family) == 2
        worker.send(signal.SIGKILL)
        await all_gone(family)
        await c.cancel(request_id)


@pytest.mark.slow
async def test_a_worker_that_is_killed_while_it_drains_loses_nothing(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    flags = ("--drain-seconds", "3600", "--lease-seconds", "1")
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *flags, engine=SLOW) as worker,
    ):
        request_id = await c.submit("run", sampling={"max_tokens": 400})
        await until_delta(client, KEYS, request_id)
        worker.send(signal.SIGTERM)
        await wait_until(lambda: "worker.draining" in worker.log)
        worker.send(signal.SIGKILL)
        async with scripted_worker(redis_url, *flags):
            assert_unbroken(await until_ended(client, KEYS, request_id), answer_to("run", 400))


BROKEN_PART = """
import sys
from inferq.worker import main, publisher

async def break_down(self):
    raise KeyError("canary-77ab")

publisher.Publisher.run = break_down
sys.exit(main.run(["--redis-url", sys.argv[1], "--served-model-name", "broken"]))
"""


def test_a_broken_part_ends_the_worker_with_1_and_says_where(redis_url: str) -> None:
    """Nothing limps on without one of its parts. The log names the place, not the message."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_PART, redis_url],
        env={**os.environ, **scripted()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [json.loads(line) for line in done.stderr.splitlines() if "worker.broke" in line]
    assert (line["error"], line["level"]) == ("KeyError", "critical")
    assert line["raised_at"][-1].endswith("break_down")
    assert "canary-77ab" not in done.stderr


async def test_both_signals_have_handlers_of_their_own(redis_url: str) -> None:
    """For process 1 of a container the kernel ignores a signal whose default action would end it."""
    async with scripted_worker(redis_url) as worker:
        status = dict(line.split(":", 1) for line in process_status(worker.pid))
        caught = int(status["SigCgt"], 16)
        for number in (signal.SIGTERM, signal.SIGINT):
            assert caught & 1 << number - 1, f"{number.name} is not caught"


def process_status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_make_namespaces() -> bool:
    return (
        shutil.which("unshare") is not None and not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    )


@pytest.mark.skipif(not can_make_namespaces(), reason="this machine lets nobody make a PID namespace")
def test_process_1_of_a_container_stops_by_sigterm(redis_url: str) -> None:
    """In a PID namespace of its own the worker is process 1, for which no signal has a default action."""
    worker = [sys.executable, "-m", "inferq.worker.main", "--redis-url", redis_url, "--served-model-name", MODEL]
    environment = {**os.environ, **scripted(*SLOW)}
    with subprocess.Popen([*NAMESPACE, *worker], env=environment, stderr=subprocess.PIPE) as outer:
        assert outer.stderr is not None
        assert any(b"worker.ready" in line for line in outer.stderr)
        (inner,) = psutil.Process(outer.pid).children()
        inner.send_signal(signal.SIGTERM)
        assert any(b"worker.stopped" in line for line in outer.stderr)
        assert outer.wait(20) == 0
