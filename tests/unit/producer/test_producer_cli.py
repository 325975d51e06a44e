"""`inferq` as its users run it: a process of its own, its output, its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE

import pytest
from support.command_line import PROCESSES, run, start, work
from support.waiting import wait_until
from support.wire import Wire, following

from inferq.producer.cli import FAILED, INTERRUPTED, OK, UNREACHABLE, USAGE, main
from inferq.producer.contract import Keys

pytestmark = pytest.mark.usefixtures("no_process_left")
Capture = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("served")
async def test_generate_streams_text(redis_url: str, wire: Wire) -> None:
    flags = [
        "--model=tiny", "--max-tokens=5", "--temperature=0.5", "--top-p=0.9", "--top-k=3",
        "--stop=a", "--stop=b", "--seed=7", "--ignore-eos",
    ]  # fmt: skip
    running = asyncio.create_task(run("generate", "Once", *flags, url=redis_url))
    request = await work(wire, "He", "llo 🦙")
    assert await running == (OK, "Hello 🦙\n", "")
    assert request == {
        "prompt": "Once",
        "sampling": {
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "stop": ["a", "b"],
            "seed": 7,
            "ignore_eos": True,
        },
    }


async def test_ctrl_c_ends_the_waiting_for_stdin(redis_url: str) -> None:
    process = await start("generate", "-", "--model=tiny", url=redis_url)
    reads = f"/proc/{process.pid}/wchan"

    def waits() -> bool:
        with open(reads) as kernel_function:
            return "pipe" in kernel_function.read()

    await wait_until(waits, what="it reads stdin")
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == INTERRUPTED
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("redirection", "says"), [(">/dev/full", "No space left"), (">&-", "standard output is closed")]
)
async def test_output_that_cannot_be_written_is_one_line(redis_url: str, redirection: str, says: str) -> None:
    command = f"exec {sys.executable} -m inferq.producer.cli status --model=tiny {redirection}"
    process = await asyncio.create_subprocess_shell(
        command, stdin=PIPE, stderr=PIPE, env={**os.environ, "INFERQ_REDIS_URL": redis_url}
    )
    PROCESSES.append(process)
    _, err = await process.communicate()
    assert process.returncode == FAILED
    assert says in err.decode()
    assert len(err.decode().splitlines()) == 1


@pytest.mark.parametrize("flag", ["--request-id=", "--model="])
async def test_an_empty_name_is_not_taken_for_none(redis_url: str, flag: str) -> None:
    code, _, err = await run("generate", "x", "--model=tiny", flag, url=redis_url)
    assert code == USAGE
    assert len(err.splitlines()) == 1


async def test_a_closed_stdin_is_said(redis_url: str) -> None:
    command = f"exec {sys.executable} -m inferq.producer.cli generate - --model=tiny <&-"
    process = await asyncio.create_subprocess_shell(
        command, stderr=PIPE, env={**os.environ, "INFERQ_REDIS_URL": redis_url}
    )
    PROCESSES.append(process)
    _, err = await process.communicate()
    assert process.returncode == USAGE
    assert "closed" in err.decode()


@pytest.mark.usefixtures("served")
async def test_text_is_printed_as_it_comes(redis_url: str, wire: Wire) -> None:
    process = await start("generate", "x", "--request-id=a", "--model=tiny", url=redis_url)

    async def claimed() -> object:
        return await wire.claim()

    (job,) = await wait_until(claimed)
    await wire.publish(following(job, 1))
    assert await process.stdout.read(1) == b"x"
    await wire.worker.finish(following(job, 2, kind="finished"))
    assert await process.communicate() == (b"\n", b"")
    assert process.returncode == OK


@pytest.mark.usefixtures("served")
async def test_generate_sends_a_chat(redis_url: str, wire: Wire) -> None:
    flags = ["--chat", "--message", "system:Be brief: very.", "--seed=1"]
    running = asyncio.create_task(run("generate", "-", *flags, url=redis_url, stdin=b"Hi\n", INFERQ_MODEL="tiny"))
    request = await work(wire, "ok\n")
    assert await running == (OK, "ok\n", "")
    assert request["messages"] == [
        {"role": "system", "content": "Be brief: very."},
        {"role": "user", "content": "Hi\n"},
    ]


@pytest.mark.usefixtures("served")
async def test_generate_prints_json(redis_url: str, wire: Wire) -> None:
    running = asyncio.create_task(run("generate", "x", "--json", "--model=tiny", "--request-id=a", url=redis_url))
    await work(wire, "é")
    code, out, err = await running
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (OK, "")
    assert [line["type"] for line in lines] == ["queued", "started", "delta", "finished"]
    assert {line["request_id"] for line in lines} == {"a"}
    assert lines[2]["text"] == "é"
    assert lines[2]["position"].endswith(":1.1")


FAILURE = '{"code":"engine_crashed","message":"it died","attempts":1}'


@pytest.mark.usefixtures("served")
async def test_a_failed_request(redis_url: str, wire: Wire) -> None:
    running = asyncio.create_task(run("generate", "x", "--model=tiny", url=redis_url))
    await work(wire, "par", kind="failed", data=FAILURE)
    assert await running == (FAILED, "par\n", "inferq: engine_crashed: it died\n")


@pytest.mark.usefixtures("served")
async def test_a_request_that_somebody_stops(redis_url: str, wire: Wire) -> None:
    running = asyncio.create_task(run("generate", "x", "--model=tiny", "--request-id=a", url=redis_url))
    await work(wire, "par", data='{"finish_reasons":["cancelled"]}')
    assert await running == (FAILED, "par\n", "inferq: a was stopped: cancelled\n")


@pytest.mark.usefixtures("served")
async def test_ctrl_c_cancels_the_request(redis_url: str, wire: Wire) -> None:
    process = await start("generate", "x", "--model=tiny", "--request-id=a", url=redis_url)

    async def claimed() -> object:
        return await wire.claim()

    (job,) = await wait_until(claimed)
    await wire.publish(following(job, 1))
    assert await process.stdout.read(1) == b"x"
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == INTERRUPTED
    assert err.decode() == "inferq: interrupted; a: cancelled\n"
    assert (await wire.worker.renew([("a", job.token)], lease_ms=60_000)).cancelled == ["a"]


async def test_output_that_nobody_reads_cancels_the_request(redis_url: str, wire: Wire) -> None:
    process = await start("generate", "x", "--model=tiny", "--request-id=a", url=redis_url)

    async def claimed() -> object:
        return await wire.claim()

    (job,) = await wait_until(claimed)
    await wire.publish(following(job, 1))
    assert await process.stdout.read(1) == b"x"
    process.stdout._transport.close()

    async def cancelled() -> bool:
        await wire.publish(following(job, number := cancelled.number))
        cancelled.number = number + 1
        return (await wire.worker.renew([("a", job.token)], lease_ms=60_000)).cancelled == ["a"]

    cancelled.number = 2
    await wait_until(cancelled)
    assert await process.wait() == FAILED
    assert b"Traceback" not in await process.stderr.read()


async def test_cancel(redis_url: str, wire: Wire) -> None:
    assert await run("cancel", "nobody", url=redis_url) == (FAILED, "unknown\n", "")
    await wire.enqueue("a")
    code, out, err = await run("cancel", "a", "--json", url=redis_url)
    assert (code, json.loads(out), err) == (OK, {"request_id": "a", "outcome": "cancelled"}, "")
    assert await run("cancel", "a", "--redis-url", redis_url, url="redis://elsewhere") == (OK, "finished\n", "")


async def test_status_of_a_request(redis_url: str, wire: Wire) -> None:
    assert await run("status", "nobody", url=redis_url) == (FAILED, "request_id: nobody\nstate: unknown\n", "")
    await wire.enqueue("a")
    code, out, _ = await run("status", "a", "--json", url=redis_url)
    assert (code, json.loads(out)) == (OK, {"request_id": "a", "state": "queued", "model": "tiny", "position": 0})
    await wire.producer.cancel("a")
    assert (await run("status", "a", url=redis_url))[
        1
    ] == "request_id: a\nstate: cancelled\nfinish_reasons: cancelled\n"


async def test_status_of_everything(redis_url: str, wire: Wire) -> None:
    keys = Keys("tiny")
    await wire.redis.set(keys.card, '{"model":"tiny","max_model_len":64}', px=15_000)
    state = '{"worker":"%s","model":"tiny","running":0,"slots":4,"heartbeat_ms":60000}'
    for name, seconds_ago in (("w1", 3), ("w2", 100)):
        await wire.redis.set(keys.worker(name), state % name, px=15_000)
        await wire.redis.zadd(keys.workers, {name: await wire.now_ms() - seconds_ago * 1000})
    await wire.redis.zadd(keys.workers, {"gone": 1})
    await wire.enqueue("a")
    code, out, err = await run("status", url=redis_url)
    assert (code, err) == (OK, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["tiny", "1", "0", "64", "1"] in rows, "a worker that is silent is none to count on"
    assert re.fullmatch(r"w1 tiny 0 4 \d+ s ago", " ".join(rows[-1]))
    assert re.fullmatch(r"w2 tiny 0 4 silent for 1\d\d s", " ".join(rows[-2]))
    found = json.loads((await run("status", "--json", url=redis_url))[1])
    assert found["models"][0]["waiting"] == 1
    told = {each["worker"]: (each["silent"], each["last_seen_seconds"] >= 3) for each in found["workers"]}
    assert told == {"w1": (False, True), "w2": (True, True)}
    assert found["workers"][1].items() >= {"model": "tiny", "running": 0, "slots": 4, "heartbeat_ms": 60_000}.items()


def test_status_with_nobody_there(redis_url: str, capsys: Capture) -> None:
    assert main(["status", "--redis-url", redis_url]) == OK
    assert capsys.readouterr().out.startswith("MODEL")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "exactly one of prompt"),
        (["generate", ""], "prompt must not be empty"),
        (["generate", "x", "--max-tokens=0"], "sampling.max_tokens"),
        (["generate", "x", "--temperature=nan"], "sampling.temperature"),
        (["generate", "x", "--request-id=a b"], "request_id"),
        (["generate", "--message", "no role"], "ROLE:TEXT"),
        (["generate", "x", "--model=a:b"], "model name"),
        (["generate", "x", "--model=tiny", "--redis-url=http://x"], "Redis URL"),
        (["cancel", "a b"], "request_id"),
        (["status", "a b"], "request_id"),
    ],
)
def test_what_is_invalid_is_one_line(capsys: Capture, arguments: list[str], message: str) -> None:
    """It is found before anything is asked of Redis, which is not there."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (USAGE, "")
    assert message in err
    assert err.startswith("inferq: ") and err.count("\n") == 1


def test_no_model(redis_url: str, capsys: Capture) -> None:
    code = main(["generate", "x", "--redis-url", redis_url])
    _, err = capsys.readouterr()
    assert (code, err.count("\n")) == (USAGE, 1)
    assert "INFERQ_MODEL" in err


@pytest.mark.parametrize("arguments", [["generate", "x", "--model=tiny"], ["cancel", "a"], ["status", "a"], ["status"]])
def test_redis_that_is_not_there_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("INFERQ_REDIS_URL", "unix:///nowhere.sock")
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (UNREACHABLE, "")
    assert "cannot be reached" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["sing"], ["generate", "x", "--max-tokens=many"], ["cancel"]])
def test_wrong_usage(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == USAGE
    assert "usage: inferq" in capsys.readouterr().err


async def test_a_duplicate_id(redis_url: str, wire: Wire) -> None:
    await wire.enqueue("a")
    code, out, err = await run("generate", "x", "--request-id=a", "--model=tiny", url=redis_url)
    assert (code, out) == (FAILED, "")
    assert "alive" in err
    assert await wire.job_keys("a") == {"job", "payload", "queue"}, "somebody else's job was touched"
