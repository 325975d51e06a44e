"""The child as the parent holds it: real processes that answer, exit, hang, talk nonsense, or read nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import SCRIPTED_ENGINE, all_gone
from support.waiting import wait_until

import inferq.engine.child
import inferq.engine.pipe
from inferq.engine.child import EngineProcess, describe_exit
from inferq.engine.config import EngineConfig
from inferq.engine.errors import EngineOverloadedError, InvalidRequestError
from inferq.engine.pipe import Abort, Add, Fatal, Freed, Log, PipeError, Ready, Step

Start = Callable[[Sequence[str]], Awaitable[EngineProcess]]
SCRIPTED = (sys.executable, str(SCRIPTED_ENGINE))


def command(code: str) -> tuple[str, ...]:
    """A child that runs `code` with its end of the pipe as `pipe`."""
    prelude = "import socket, sys, time; pipe = socket.socket(fileno=int(sys.argv[sys.argv.index('--fd') + 1]));"
    return (sys.executable, "-c", prelude + code)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(cache_dir=str(tmp_path))


@pytest.fixture
async def start(config: EngineConfig) -> AsyncIterator[Start]:
    """Starts children, and sees them ended whatever the test comes to."""
    started: list[EngineProcess] = []

    async def start_child(command: Sequence[str]) -> EngineProcess:
        process = await EngineProcess.start(command, config)
        started.append(process)
        return process

    yield start_child
    for process in started:
        await process.end(grace_seconds=0)


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


async def read(process: EngineProcess, done: Callable[[list[Any]], bool] = lambda seen: False) -> list[Any]:
    """All messages, chunk by chunk, until `done` says so of them or the pipe ends."""
    seen: list[Any] = []
    while not done(seen) and (messages := await process.receive()) is not None:
        seen += messages
    return seen


def has(kind: type) -> Callable[[list[Any]], bool]:
    return lambda seen: any(isinstance(message, kind) for message in seen)


async def test_it_speaks_and_stops_in_good_order(start: Start) -> None:
    process = await start(SCRIPTED)
    assert [type(m) for m in await read(process, has(Ready))] == [Log, Ready]
    process.send(Abort(2))
    assert [type(m) for m in await read(process, has(Freed))] == [Freed]
    process.send(Add(1, [65, 66], {"max_tokens": 3}))

    *steps, freed = await read(process, has(Freed))
    assert isinstance(freed, Freed) and freed.key == 1
    assert [(key, len(ids), reason) for step in steps for key, ids, reason in step.outputs] == [
        (1, 1, None),
        (1, 1, None),
        (1, 1, "length"),
    ]
    assert await process.terminate(grace_seconds=20) == 0
    assert not psutil.pid_exists(process.pid)
    process.send(Abort(1))  # nobody is there: no error


async def test_a_child_that_hangs_is_killed_after_the_grace(start: Start) -> None:
    process = await start(command("time.sleep(600)"))
    assert await process.terminate(grace_seconds=0.05) == -signal.SIGKILL
    assert await read(process) == []


async def test_the_grace_cut_short_leaves_no_child(start: Start) -> None:
    process = await start(command("time.sleep(600)"))
    ending = asyncio.create_task(process.terminate(grace_seconds=600))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert not psutil.pid_exists(process.pid)


async def test_what_the_child_has_started_goes_with_it(start: Start) -> None:
    code = (
        "import subprocess; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "from inferq.engine.pipe import encode, Fatal; pipe.sendall(encode(Fatal(str(p.pid)))); time.sleep(600)"
    )
    process = await start(command(code))
    (message,) = await read(process, has(Fatal))
    grandchild = psutil.Process(int(message.message))
    assert await process.end(grace_seconds=0) == -signal.SIGKILL
    await all_gone([grandchild])


async def test_garbage_is_a_pipe_error_after_what_was_good(start: Start) -> None:
    code = "from inferq.engine.pipe import encode, Fatal; pipe.sendall(encode(Fatal('x')) + b'\\xff' * 64)"
    process = await start(command(code))
    seen: list[Any] = []
    with pytest.raises(PipeError, match="is over"):
        while (messages := await process.receive()) is not None:
            seen.extend(messages)
    assert [type(message) for message in seen] == [Fatal]
    await process.end(grace_seconds=20)


@pytest.mark.parametrize("received", [False, True], ids=["in the pipe", "received"])
async def test_its_last_words_are_heard_by_who_writes_to_it_in_that_moment(start: Start, received: bool) -> None:
    """It leaves with something unread; then a write fails, and takes nothing with it that can still be read."""
    process = await start(
        command("from inferq.engine.pipe import encode, Fatal; pipe.sendall(encode(Fatal('told to fail')))")
    )
    if received:
        await wait_until(lambda: process._reader._buffer)
    process._process.wait(20)  # without a turn of the event loop
    for key in range(3):
        process.send(Add(key, [1] * 100_000, {}))
    assert await read(process) == [Fatal("told to fail")]


async def test_what_would_wait_beyond_the_bound_is_refused_and_the_child_lives(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child did not get to read what came all at once: it is stopped here, and lives on."""
    monkeypatch.setattr(inferq.engine.child, "MAX_UNSENT_BYTES", 1024 * 1024)
    process = await start(SCRIPTED)
    await read(process, has(Ready))
    os.kill(process.pid, signal.SIGSTOP)
    sent = 0
    with pytest.raises(EngineOverloadedError, match="of 1048576"):
        while sent < 1000:
            process.send(Add(sent + 1, [1] * 10_000, {"max_tokens": 1}))
            sent += 1
    process.send(Abort(sent))  # what is small is sent all the same
    os.kill(process.pid, signal.SIGCONT)
    seen = await read(process, lambda seen: any(isinstance(m, Freed) and m.key == sent for m in seen))
    assert sent in [message.key for message in seen if isinstance(message, Freed)]
    process.send(Add(2000, [65], {"max_tokens": 1}))
    steps = await read(
        process, lambda seen: any(key == 2000 for m in seen if isinstance(m, Step) for key, *_ in m.outputs)
    )
    assert steps
    assert await process.terminate(grace_seconds=20) == 0


async def test_a_prompt_that_no_frame_holds_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inferq.engine.pipe, "MAX_FRAME_BYTES", 1024)
    process = await start(command("time.sleep(600)"))
    with pytest.raises(InvalidRequestError, match="too long"):
        process.send(Add(1, [1] * 10_000, {}))


async def test_its_prints_go_to_standard_error() -> None:
    code = """
import asyncio, sys
from inferq.engine.child import EngineProcess
from inferq.engine.config import EngineConfig
async def main():
    process = await EngineProcess.start((sys.executable, "-c", "print('printed by a model')"), EngineConfig())
    await process.end(grace_seconds=60)
asyncio.run(main())
"""
    result = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "printed by a model\n")


async def test_a_program_that_is_not_there_leaks_nothing(config: EngineConfig) -> None:
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await EngineProcess.start(("/no/such/engine",), config)
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize(
    ("status", "words"), [(0, "exited with code 0"), (-9, "was killed by SIGKILL"), (-250, "was killed by signal 250")]
)
def test_an_exit_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux' own")
@pytest.mark.parametrize("busy", [[], ["--hang-after", "0"]])
async def test_kill_9_of_the_parent_leaves_no_child(busy: list[str], tmp_path: Path) -> None:
    """Also while the child hangs in a step."""
    code = f"""
import asyncio
from inferq.engine.child import EngineProcess
from inferq.engine.config import EngineConfig
from inferq.engine.pipe import Add, Ready
async def main():
    process = await EngineProcess.start({(*SCRIPTED, *busy)!r}, EngineConfig(cache_dir={str(tmp_path)!r}))
    while not any(isinstance(m, Ready) for m in await process.receive()):
        pass
    process.send(Add(1, [65], {{"max_tokens": 30000}}))
    print(process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with python(code) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(await asyncio.to_thread(parent.stdout.readline)))
        assert child.is_running()
        parent.kill()
        parent.wait()
        await all_gone([child])
