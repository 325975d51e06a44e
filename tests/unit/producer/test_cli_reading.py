"""`inferq tail` and `inferq chat`: Ctrl-C stops what it should, and nothing else; what is said besides the answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from typing import Any

import pytest
from support.command_line import PROCESSES, run, start, work
from support.reading import blocked_readers
from support.terminal import terminal
from support.waiting import wait_until
from support.wire import Wire, following

from inferq.producer.cli import FAILED, INTERRUPTED, OK, UNREACHABLE, USAGE

pytestmark = pytest.mark.usefixtures("no_process_left", "served")

FAILURE = '{"code":"engine_crashed","message":"it died","attempts":1}'


async def claimed(wire: Wire) -> Any:
    async def found() -> Any:
        return await wire.claim()

    (job,) = await wait_until(found)
    return job


class TestTail:
    async def test_it_shows_what_was_and_what_comes(self, redis_url: str, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.publish(following(job, 1))
        process = await start("tail", "a", url=redis_url)
        assert await process.stdout.read(1) == b"x"
        await wire.publish(following(job, 2))
        assert await process.stdout.read(1) == b"x"
        await wire.worker.finish(following(job, 3, kind="finished"))
        assert await process.communicate() == (b"\n", b"")
        assert process.returncode == OK

    async def test_it_goes_on_from_a_position(self, redis_url: str, wire: Wire) -> None:
        job = await wire.claimed("a")
        for number in (1, 2):
            await wire.publish(following(job, number))
        await wire.worker.finish(following(job, 3, kind="finished"))
        code, out, _ = await run("tail", "a", "--position", f"{job.epoch}-1:1.1", "--json", url=redis_url)
        assert code == OK
        assert [json.loads(line)["type"] for line in out.splitlines()] == ["delta", "finished"]

    async def test_ctrl_c_leaves_the_request_alone(self, redis_url: str, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.publish(following(job, 1))
        process = await start("tail", "a", url=redis_url)
        assert await process.stdout.read(1) == b"x"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert process.returncode == INTERRUPTED
        assert err.decode() == f"inferq: interrupted; a goes on: read on with --position {job.epoch}-1:1.1\n"
        assert not (await wire.worker.renew([("a", job.token)], lease_ms=60_000)).cancelled

    async def test_what_is_not_there(self, redis_url: str) -> None:
        code, out, err = await run("tail", "nobody", url=redis_url)
        assert (code, out) == (FAILED, "") and "nobody" in err
        code, out, err = await run("tail", "a", "--position", "$", url=redis_url)
        assert (code, out) == (USAGE, "") and "position" in err

    async def test_nobody_serves_the_model(self, redis_url: str, wire: Wire) -> None:
        await wire.redis.delete(wire.keys.card)
        await wire.enqueue("a")
        process = await start("tail", "a", url=redis_url)
        assert await process.stderr.readline() == b"inferq: no worker serves tiny now; the request waits for one\n"
        await wire.producer.cancel("a")
        await process.communicate()
        assert process.returncode == FAILED


class TestChat:
    async def test_each_line_is_answered_knowing_what_was_said(self, redis_url: str, wire: Wire) -> None:
        flags = ["--model=tiny", "--system=Be brief.", "--max-tokens=9"]
        chat = asyncio.create_task(run("chat", *flags, url=redis_url, stdin="Hi\n\nMore é\n".encode()))
        first = await work(wire, "Hel", "lo")
        second = await work(wire, "Yes\n")
        assert await chat == (OK, "Hello\nYes\n", "")
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert first["messages"] == said
        said += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More é"}]
        assert second["messages"] == said
        assert second["sampling"]["max_tokens"] == 9

    async def test_ctrl_c_stops_the_answer_and_not_the_program(self, redis_url: str, wire: Wire) -> None:
        process = await start("chat", "--model=tiny", url=redis_url)
        process.stdin.write(b"Hi\n")
        job = await claimed(wire)
        await wire.publish(following(job, 1))
        assert await process.stdout.read(1) == b"x"
        process.send_signal(signal.SIGINT)
        assert await process.stderr.readline() == b"inferq: stopped\n"
        renewed = await wire.worker.renew([(job.request_id, job.token)], lease_ms=60_000)
        assert renewed.cancelled == [job.request_id]
        process.stdin.write(b"And?\n")
        request = await work(wire, "ok")
        assert [each["content"] for each in request["messages"]] == ["Hi", "x", "And?"]
        out, err = await process.communicate(b"")
        assert (process.returncode, out, err) == (OK, b"\nok\n", b"")

    async def test_a_failed_answer_is_forgotten(self, redis_url: str, wire: Wire) -> None:
        chat = asyncio.create_task(run("chat", "--model=tiny", url=redis_url, stdin=b"Hi\nAgain\n"))
        await work(wire, "par", kind="failed", data=FAILURE)
        request = await work(wire, "ok")
        assert await chat == (OK, "par\nok\n", "inferq: engine_crashed: it died\n")
        assert [each["content"] for each in request["messages"]] == ["Again"]

    async def test_the_last_answer_tells_how_it_ended(self, redis_url: str, wire: Wire) -> None:
        chat = asyncio.create_task(run("chat", "--model=tiny", url=redis_url, stdin=b"Hi\n"))
        await work(wire, kind="failed", data=FAILURE)
        assert (await chat)[0] == FAILED

    async def test_who_hangs_up_is_a_reader_that_has_gone(self, redis_url: str, wire: Wire) -> None:
        process = await start("chat", "--model=tiny", url=redis_url)
        process.stdin.write(b"Hi\n")
        job = await claimed(wire)

        async def is_read() -> bool:
            return bool(await wire.redis.exists(wire.keys.reader(job.request_id)))

        await wait_until(is_read)
        process.kill()
        await process.wait()
        await wire.reader_leaves(job.request_id)
        renewed = await wire.worker.renew([(job.request_id, job.token)], lease_ms=60_000)
        assert renewed.cancelled == [job.request_id]

    async def test_in_a_terminal(self, redis_url: str, wire: Wire) -> None:
        """A prompt; Ctrl-C there says how to leave; Ctrl-D leaves."""
        async with terminal("chat", "--model=tiny", url=redis_url) as seen:
            await seen.until(b"> ")
            seen.type(b"\x03")
            await seen.until(b"Ctrl-D leaves")
            await seen.until(b"> ")
            seen.type(b"Hi\r")
            await work(wire, "Hello")
            await seen.until(b"Hello\r\n")
            await seen.until(b"> ")
            seen.type(b"\x04")
            assert await seen.process.wait() == OK


class TestNotices:
    """Each is a line of its own where a terminal shows it, and no part of what was generated where nobody shows it."""

    NO_WORKER = b"inferq: no worker serves tiny now; the request waits for one\r\n"

    async def test_before_the_first_token(self, redis_url: str, wire: Wire) -> None:
        await wire.redis.delete(wire.keys.card)
        async with terminal("generate", "x", "--model=tiny", url=redis_url) as seen:
            assert await seen.until(b"\n") == self.NO_WORKER
            await work(wire, "Hello")
            assert await seen.until(b"\n") == b"Hello\r\n"
            assert await seen.process.wait() == OK

    @pytest.mark.parametrize("command", [["tail", "a"], ["generate", "x", "--model=tiny", "--request-id=a"]])
    async def test_in_the_middle_of_a_line(self, redis_url: str, wire: Wire, command: list[str]) -> None:
        """The only worker dies, and what it had begun waits for another."""
        if command[0] == "tail":
            await wire.enqueue("a")
        async with terminal(*command, url=redis_url) as seen:
            job = await claimed(wire)
            await wire.publish(following(job, 1))
            assert await seen.until(b"x") == b"x"
            await wire.redis.delete(wire.keys.card)
            await wire.lapse("a")
            (reader,) = await wait_until(lambda: blocked_readers(wire.redis))
            await wire.redis.client_kill_filter(_id=reader["id"])
            assert await seen.until(self.NO_WORKER) == b"\r\n" + self.NO_WORKER
            (again,) = await wire.claim()
            await wire.publish(following(again, 1))
            assert await seen.until(b"x") == b"x"
            seen.type(b"\x03")
            told = await seen.until(b"a: cancelled\r\n" if command[0] == "generate" else b".2\r\n")
            assert told.startswith(b"^C\r\ninferq: interrupted; a"), told
            assert await seen.process.wait() == INTERRUPTED

    async def test_a_file_holds_the_answer_alone(self, redis_url: str, wire: Wire) -> None:
        await wire.redis.delete(wire.keys.card)
        process = await start("generate", "x", "--model=tiny", url=redis_url)
        assert process.stderr is not None
        assert await process.stderr.readline() == self.NO_WORKER.replace(b"\r", b"")
        await work(wire, "Hel", "lo")
        assert await process.communicate() == (b"Hello\n", b"")
        assert process.returncode == OK

    @pytest.mark.parametrize("stderr", ["&-", "/dev/full"])
    async def test_nobody_reads_them(self, redis_url: str, wire: Wire, stderr: str) -> None:
        """They are lost; the answer, the errors' exit codes and stdout are as they would be."""
        await wire.redis.delete(wire.keys.card)
        asked = asyncio.create_task(quiet("generate", "x", "--model=tiny", url=redis_url, stderr=stderr))
        await work(wire, "Hello")
        assert await asked == (OK, b"Hello\n")
        assert await quiet("tail", "nobody", url=redis_url, stderr=stderr) == (FAILED, b"")
        assert await quiet("status", "a", url="redis://127.0.0.1:1", stderr=stderr) == (UNREACHABLE, b"")
        assert await quiet("tail", url=redis_url, stderr=stderr) == (USAGE, b"")


async def quiet(*arguments: str, url: str, stderr: str) -> tuple[int | None, bytes]:
    """The exit code and stdout of `inferq` with a stderr that cannot be written to."""
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f'exec "$@" 2>{stderr}',
        "sh",
        sys.executable,
        "-m",
        "inferq.producer.cli",
        *arguments,
        stdout=PIPE,
        env={**os.environ, "INFERQ_REDIS_URL": url},
    )
    PROCESSES.append(process)
    out, _ = await process.communicate()
    return process.returncode, out
