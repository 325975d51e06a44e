"""Dead letters, as a client and as the command line show them: never a prompt that nobody asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from support.wire import Wire, following

from inferq.producer import InferenceClient, QueueFull, UnknownRequest
from inferq.producer.cli import FAILED, OK, main
from inferq.worker.commands import DeadLetter

Run = Callable[..., Awaitable[tuple[int, str, str]]]

SECRET = "what nobody should see"


@pytest.fixture
def run(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line within this process, which prints what the other one prints."""

    async def call(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [*arguments, "--model=tiny", f"--redis-url={redis_url}"])
        return code, *capsys.readouterr()

    return call


async def died(producer: InferenceClient, wire: Wire, request_id: str) -> None:
    await producer.submit(SECRET, request_id=request_id, priority=3, tenant="acme", sampling={"seed": 7})
    (job,) = await wire.claim()
    await wire.worker.finish(following(job, 1, kind="failed"), dead=DeadLetter("engine_crashed", 2))


async def test_a_client_sees_shows_and_requeues(producer: InferenceClient, wire: Wire) -> None:
    assert await producer.dead_letters() == []
    await died(producer, wire, "a")
    await died(producer, wire, "b")
    assert [(each.request_id, each.reason, each.attempts) for each in await producer.dead_letters()] == [
        ("b", "engine_crashed", 2),
        ("a", "engine_crashed", 2),
    ]
    assert len(await producer.dead_letters(limit=1)) == 1
    letter, request = await producer.dead_letter("a")
    assert (letter.request_id, request.prompt, request.sampling.seed) == ("a", SECRET, 7)
    again = await producer.requeue("a")
    assert again != "a"
    assert [each.request_id for each in await producer.dead_letters()] == ["b"]
    job = await wire.redis.hgetall(wire.keys.job(again))
    assert (job[b"tenant"], job[b"priority"]) == (b"acme", b"3")
    assert (await producer.status("a")).error_code == "internal", "the stream of the dead one stands"


async def test_what_is_not_there(producer: InferenceClient, wire: Wire) -> None:
    with pytest.raises(UnknownRequest):
        await producer.dead_letter("nobody")
    with pytest.raises(UnknownRequest):
        await producer.requeue("nobody")
    await died(producer, wire, "a")
    await wire.redis.delete(wire.keys.dead_payload("a"))
    assert (await producer.dead_letter("a"))[1] is None
    with pytest.raises(UnknownRequest, match="expired"):
        await producer.requeue("a")


async def test_a_full_queue_takes_no_letter_back(redis_url: str, producer: InferenceClient, wire: Wire) -> None:
    await died(producer, wire, "a")
    async with InferenceClient.from_url(redis_url, model="tiny", max_backlog=1) as narrow:
        await narrow.submit("x")
        with pytest.raises(QueueFull):
            await narrow.requeue("a")
    assert [each.request_id for each in await producer.dead_letters()] == ["a"]


async def test_the_command_line_lists_them(run: Run, producer: InferenceClient, wire: Wire) -> None:
    assert await run("dead", "list") == (OK, "ID  REASON  ATTEMPTS  DIED\n", "")
    await died(producer, wire, "a")
    code, out, _ = await run("dead", "list")
    assert (code, out.splitlines()[1].split()[:3]) == (OK, ["a", "engine_crashed", "2"])
    code, out, _ = await run("dead", "list", "--json", "--limit=5")
    (line,) = map(json.loads, out.splitlines())
    assert (code, line["request_id"], line["reason"], line["attempts"]) == (OK, "a", "engine_crashed", 2)


@pytest.mark.parametrize("flags", [[], ["--json"]])
async def test_a_prompt_is_shown_only_when_asked_for(
    run: Run, producer: InferenceClient, wire: Wire, flags: list[str]
) -> None:
    await died(producer, wire, "a")
    for verb in (["list"], ["show", "a"]):
        code, out, err = await run("dead", *verb, *flags)
        assert code == OK and "engine_crashed" in out
        assert SECRET not in out + err
    code, out, _ = await run("dead", "show", "a", "--payload", *flags)
    assert code == OK and SECRET in out


async def test_the_command_line_requeues(run: Run, producer: InferenceClient, wire: Wire) -> None:
    await died(producer, wire, "a")
    code, out, err = await run("dead", "requeue", "a")
    assert (code, err) == (OK, "")
    assert (await producer.status(out.strip())).state == "queued"
    code, out, err = await run("dead", "requeue", "a")
    assert (code, out) == (FAILED, "") and "'a'" in err
