"""The client without an event loop of the caller's: threads, forks, Ctrl-C, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.reading import blocked_readers, generate, kinds, tokens, until_blocked
from support.waiting import wait_until
from support.wire import Wire

from inferq.producer import (
    CancelOutcome,
    InferenceClient,
    InvalidRequest,
    RedisUnavailable,
    State,
    SyncInferenceClient,
    UnknownRequest,
    UnsuitableConnection,
)

pytestmark = pytest.mark.usefixtures("served")


@pytest.fixture
def sync(redis_url: str) -> Iterator[SyncInferenceClient]:
    with SyncInferenceClient(redis_url, model="tiny") as client:
        yield client
    assert client_threads() == []


def client_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "inferq-client"]


async def test_a_request_from_its_submission_to_its_result(sync: SyncInferenceClient, wire: Wire) -> None:
    """The test's own loop is the worker; the client's calls are made by another thread, as a web server's are."""
    request_id = await asyncio.to_thread(sync.submit, "hello", sampling={"max_tokens": 4})
    assert (await asyncio.to_thread(sync.status, request_id)).state is State.QUEUED
    reader = asyncio.create_task(asyncio.to_thread(lambda: list(sync.stream(request_id))))
    result = asyncio.create_task(asyncio.to_thread(sync.result, request_id))
    (job,) = await wire.claim()
    await generate(wire, job)
    assert kinds(await reader) == ["queued", "started", "delta", "delta", "delta", "delta", "finished"]
    assert (await result).text == "xxxx"
    assert await asyncio.to_thread(sync.cancel, request_id) is CancelOutcome.FINISHED
    assert (await asyncio.to_thread(sync.fleet)).models[0].model == "tiny"


async def test_a_position_goes_on_with_the_rest(sync: SyncInferenceClient, wire: Wire) -> None:
    await generate(wire, await wire.claimed("a"))

    def read_in_parts() -> list[Any]:
        events, position = [], "0"
        while not events or events[-1].type != "finished":
            with sync.stream("a", position) as stream:
                events.append(next(stream))
                position = stream.position
        return events

    assert tokens(await asyncio.to_thread(read_in_parts)) == [1, 2, 3, 4]


async def test_many_threads_share_one_client_and_one_connection(sync: SyncInferenceClient, wire: Wire) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(20) as pool:
        ids = await asyncio.gather(*(loop.run_in_executor(pool, sync.submit, f"p{n}") for n in range(20)))
        readers = [loop.run_in_executor(pool, lambda each=each: list(sync.stream(each))) for each in ids]
        await until_blocked(wire.redis)
        assert len(client_threads()) == 1
        for job in await wire.claim(slots=20):
            await generate(wire, job)
        assert all(tokens(events) == [1, 2, 3, 4] for events in await asyncio.gather(*readers))


def test_errors_are_those_of_the_other_client(sync: SyncInferenceClient) -> None:
    with pytest.raises(UnknownRequest):
        next(sync.stream("nobody"))
    with pytest.raises(InvalidRequest):
        sync.submit("")
    with pytest.raises(InvalidRequest):
        sync.stream("a b")
    with pytest.raises(UnknownRequest):
        sync.requeue("nobody")
    with pytest.raises(UnsuitableConnection):
        SyncInferenceClient("http://elsewhere")


async def test_a_result_that_does_not_come_in_time(sync: SyncInferenceClient, wire: Wire) -> None:
    await wire.claimed("a")
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(sync.result, "a", 0.05)


async def test_closing_ends_whoever_waits(redis_url: str, wire: Wire) -> None:
    sync = SyncInferenceClient(redis_url, model="tiny")
    await wire.claimed("a")
    reader = asyncio.create_task(asyncio.to_thread(lambda: list(sync.stream("a"))))
    result = asyncio.create_task(asyncio.to_thread(sync.result, "a"))
    await until_blocked(wire.redis)
    await asyncio.to_thread(sync.close)
    for waiting in (reader, result):
        with pytest.raises(RedisUnavailable, match="closed"):
            await waiting
    assert not client_threads()
    assert not await blocked_readers(wire.redis)
    with pytest.raises(RedisUnavailable, match="closed"):
        sync.submit("x")
    sync.close()


async def test_a_stream_may_be_closed_by_another_thread(sync: SyncInferenceClient, wire: Wire) -> None:
    await wire.claimed("a")
    stream = await asyncio.to_thread(sync.stream, "a")
    reader = asyncio.create_task(asyncio.to_thread(list, stream))
    await until_blocked(wire.redis)
    await asyncio.to_thread(stream.close)
    assert kinds(await reader) == ["queued", "started"]


async def test_a_loop_that_is_left_early_leaves_nothing(sync: SyncInferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    await generate(wire, job, last=1, end=False)

    def leave_early() -> None:
        for event in sync.stream("a"):
            if event.type == "delta":
                break

    await asyncio.to_thread(leave_early)
    gc.collect()

    async def nobody_reads() -> bool:
        return not await blocked_readers(wire.redis)

    await wait_until(nobody_reads)


def test_a_client_that_is_forgotten_ends_its_thread(redis_url: str) -> None:
    sync = SyncInferenceClient(redis_url, model="tiny")
    assert sync.status("a").state is State.UNKNOWN
    assert len(client_threads()) == 1
    del sync
    gc.collect()
    assert not client_threads()


def test_its_own_thread_is_told_instead_of_waiting_for_itself(sync: SyncInferenceClient) -> None:
    async def call_again(_: InferenceClient) -> None:
        sync.status("a")

    with pytest.raises(RuntimeError, match="own thread"):
        sync._background.run(call_again)


def python(program: str, *arguments: str) -> str:
    """What a process of its own prints; warnings are errors there too."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


FORK = """
import os, sys
from inferq.producer import SyncInferenceClient
client = SyncInferenceClient(sys.argv[1], model="tiny")
request_id = client.submit("x")
stream = client.stream(request_id)
assert next(stream).type == "queued"
child = os.fork()
if child == 0:
    assert client.status(request_id).state == "queued"
    assert next(client.stream(request_id)).type == "queued"
    client.submit("from the child", request_id="child")
    client.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert client.status("child").state == "queued"
client.cancel(request_id)
assert [event.type for event in stream] == ["finished"]
print("done")
"""


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


@forks
def test_it_works_on_both_sides_of_a_fork(redis_url: str) -> None:
    assert python(FORK, redis_url) == "done\n"


FORKED_STREAM = """
import os, signal, sys, threading
from inferq.producer import SyncInferenceClient
client = SyncInferenceClient(sys.argv[1], model="tiny")
request_id = client.submit("x")
stream = client.stream(request_id)
left_alone = client.stream(request_id)
assert next(stream).type == next(left_alone).type == "queued"
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    next(stream)
except KeyboardInterrupt:
    pass  # the next event is still waited for, by the parent's thread
child = os.fork()
if child == 0:
    left_alone.close()
    assert list(left_alone) == []
    client.cancel(request_id)
    assert [event.type for event in stream] == ["finished"]
    assert list(stream) == []
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert [event.type for event in stream] == ["finished"]
assert [event.type for event in left_alone] == ["finished"]
print("done")
"""


@forks
def test_a_stream_goes_on_from_where_it_was_on_both_sides_of_a_fork(redis_url: str) -> None:
    assert python(FORKED_STREAM, redis_url) == "done\n"


LOCKED = """
import os, sys, threading
from inferq.producer import SyncInferenceClient
client = SyncInferenceClient(sys.argv[1], model="tiny")
held, ended = threading.Event(), threading.Event()
def begin():
    with client._background._lock:
        held.set()
        ended.wait()
threading.Thread(target=begin).start()
held.wait()
child = os.fork()
if child == 0:
    assert client.status("a").state == "unknown"
    os._exit(0)
ended.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""


@forks
def test_a_fork_while_another_thread_begins_a_call(redis_url: str) -> None:
    assert python(LOCKED, redis_url) == "done\n"


UNCLOSED = """
import sys
from inferq.producer import SyncInferenceClient
client = SyncInferenceClient(sys.argv[1], model="tiny")
request_id = client.submit("x")
stream = client.stream(request_id)
print(next(stream).type)
"""


def test_a_program_that_never_closes_it_ends(redis_url: str) -> None:
    assert python(UNCLOSED, redis_url) == "queued\n"


INTERRUPTED = """
import os, signal, sys, threading
from inferq.producer import SyncInferenceClient
with SyncInferenceClient(sys.argv[1], model="tiny") as client:
    stream = client.stream(sys.argv[2])
    types = [next(stream).type, next(stream).type]
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        next(stream)
    except KeyboardInterrupt:
        types.append("interrupted")
    print(types, flush=True)
    print([event.type for event in stream])
"""


async def test_ctrl_c_interrupts_a_wait_and_loses_no_event(redis_url: str, wire: Wire) -> None:
    job = await wire.claimed("a")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "dev", "-c", INTERRUPTED, redis_url, "a", stdout=asyncio.subprocess.PIPE
    )
    assert await process.stdout.readline() == b"['queued', 'started', 'interrupted']\n"
    await generate(wire, job, last=2)
    out, _ = await process.communicate()
    assert out == b"['delta', 'delta', 'finished']\n"
    assert process.returncode == 0
