"""The web apps: whole answers by any instance, stopped when asked to, ended when nobody reads, refused by a status."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import redis.asyncio
from support.queue import KEYS, MODEL, left_over, scripted_worker
from support.streams import until_delta, until_ended
from support.waiting import wait_until
from support.web_apps import KINDS, chat_answer, text_of, tokens_of, web_app

pytestmark = pytest.mark.slow(family="examples", share=0.25)

SLOW = ["--step-ms", "20"]
#: More than a reader's period of saying that it is there, and so renewed if there is one.
LEFT_MS = 12_000

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
async def test_a_chat_is_streamed_to_its_end(kind: str, redis_url: str, folder: Path) -> None:
    async with scripted_worker(redis_url), web_app(kind, redis_url, folder) as app:
        chat = await app.ask("Hello äöü 🦙", max_tokens=40)
        async with app.listen(chat) as heard:
            assert heard.response.status_code == 200
            assert heard.response.headers["content-type"].startswith("text/event-stream")
            assert heard.response.headers["cache-control"] == "no-cache"
            assert heard.response.headers["x-accel-buffering"] == "no"
            await heard.to_the_end()
        assert tokens_of(heard.events) == chat_answer("Hello äöü 🦙", 40)
        assert text_of(heard.events).encode() == bytes(tokens_of(heard.events))
        assert [kind for kind, _ in heard.events if kind != "delta"] == ["queued", "started", "finished"]
        assert heard.events[-1][1]["finish_reasons"] == ["length"]
        assert heard.retry_ms == 1000
        # A browser that lost the connection right at the end is told not to come again.
        async with app.listen(chat, heard.last_event_id) as nothing:
            assert nothing.response.status_code == 204
        async with app.listen(chat) as again:
            await again.to_the_end()
        assert again.events == heard.events
        assert (await app.browser.post(f"/chats/{chat}/cancel")).json() == {"outcome": "finished"}


@kinds
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
async def test_an_answer_goes_on_at_another_instance(
    kind: str, end: signal.Signals, redis_url: str, folder: Path
) -> None:
    """The connection breaks with its instance; the browser says what it has to the next one, which it never met."""
    async with scripted_worker(redis_url, engine=SLOW), web_app(kind, redis_url, folder, "b") as b:
        async with web_app(kind, redis_url, folder, "a") as a:
            chat = await a.ask("Tell me much", max_tokens=200)
            async with a.listen(chat) as first:
                await first.until_tokens(30)
            a.process.send_signal(end)
            a.process.wait(30)
        async with b.listen(chat, first.last_event_id) as rest:
            await rest.to_the_end()
    assert len(tokens_of(first.events)) < 200
    assert tokens_of(first.events) + tokens_of(rest.events) == chat_answer("Tell me much", 200)
    assert (text_of(first.events) + text_of(rest.events)).encode() == bytes(chat_answer("Tell me much", 200))
    assert [kind for kind, _ in rest.events if kind != "delta"] == ["finished"]


async def test_sigterm_ends_an_instance_that_still_streams(redis_url: str, folder: Path) -> None:
    async with scripted_worker(redis_url, engine=SLOW), web_app("fastapi", redis_url, folder) as app:
        chat = await app.ask("Tell me much", max_tokens=4096)
        async with app.listen(chat) as heard:
            await heard.until_tokens(3)
            app.process.terminate()
            with pytest.raises(Exception, match="closed"):
                await heard.to_the_end()
            app.process.wait(30)


@kinds
async def test_stop_ends_it_wherever_it_runs(
    kind: str, redis_url: str, client: redis.asyncio.Redis, folder: Path
) -> None:
    async with scripted_worker(redis_url, engine=SLOW), web_app(kind, redis_url, folder) as app:
        chat = await app.ask("Tell me much", max_tokens=4096)
        async with app.listen(chat) as heard:
            await heard.until_tokens(10)
            assert (await app.browser.post(f"/chats/{chat}/cancel")).json() == {"outcome": "requested"}
            await heard.to_the_end()
        name, data = heard.events[-1]
        assert (name, data["finish_reasons"]) == ("finished", ["cancelled"])
        number = len(tokens_of(heard.events))
        assert 10 <= number < 4096
        assert tokens_of(heard.events) == chat_answer("Tell me much", number)
        await wait_until(lambda: _nothing_left(client), what="nothing is left of it")


async def _nothing_left(client: redis.asyncio.Redis) -> bool:
    return await left_over(client) == set()


@kinds
async def test_an_answer_that_nobody_reads_is_cancelled(
    kind: str, redis_url: str, client: redis.asyncio.Redis, folder: Path
) -> None:
    """The browser's connection breaks. The app itself lives on, and must not go on saying that somebody reads."""
    async with scripted_worker(redis_url, engine=SLOW), web_app(kind, redis_url, folder) as app:
        chat = await app.ask("Tell me much", max_tokens=4096)
        async with app.listen(chat) as heard:
            await heard.until_tokens(3)
            assert await client.pttl(KEYS.reader(chat)) > LEFT_MS
        await until_delta(client, KEYS, chat, at_least=len(tokens_of(heard.events)) + 20)  # a write has failed since
        await client.pexpire(KEYS.reader(chat), LEFT_MS)
        found = await until_ended(client, KEYS, chat, timeout=60)
        assert found[-1].finish_reasons == ("cancelled",)


@kinds
async def test_browsers_that_leave_a_replay_are_nothing_to_log(kind: str, redis_url: str, folder: Path) -> None:
    """At any place, with more there than they have taken. The app's log is looked at when it ends."""
    async with scripted_worker(redis_url), web_app(kind, redis_url, folder) as app:
        chat = await app.ask("Tell me much", max_tokens=2000)
        async with app.listen(chat) as heard:
            await heard.to_the_end()
        total = len(heard.events)
        for number in range(0, total, max(1, total // 10)):
            async with app.listen(chat) as leaving:
                async for _ in leaving:
                    if len(leaving.events) >= number:
                        break
            assert leaving.events == heard.events[: len(leaving.events)]
        async with app.listen(chat) as again:
            await again.to_the_end()
        assert again.events == heard.events


@pytest.mark.timeout(240)
@kinds
async def test_a_chat_that_waits_is_kept_alive_and_forgotten_when_its_browser_goes(
    kind: str, redis_url: str, client: redis.asyncio.Redis, folder: Path
) -> None:
    """Nothing is said while it waits, but for a comment now and then."""
    flags = ("--max-num-seqs", "1")
    async with (
        scripted_worker(redis_url, *flags, engine=["--step-ms", "100"]),
        web_app(kind, redis_url, folder) as app,
    ):
        busy = await app.ask("Tell me much", max_tokens=4096)
        async with app.listen(busy) as heard:
            await heard.until_tokens(1)
            chat = await app.ask("And then?", max_tokens=5)
            async with app.listen(chat) as waiting:
                async for _ in waiting:
                    if waiting.comments:
                        break
            assert [name for name, _ in waiting.events] == ["queued"]
            found = await until_ended(client, KEYS, chat, timeout=100)
            assert found[-1].finish_reasons == ("cancelled",)
            await app.browser.post(f"/chats/{busy}/cancel")
            await heard.to_the_end()


@kinds
async def test_a_full_queue_is_a_429(kind: str, redis_url: str, folder: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-backlog", "1")
    async with scripted_worker(redis_url, *flags, engine=SLOW), web_app(kind, redis_url, folder) as app:
        running = await app.ask("Tell me much", max_tokens=4096)
        async with app.listen(running) as heard:
            await heard.until_tokens(1)
            waiting = await app.ask("And then?")
            refused = await app.browser.post("/chats", json={"message": "And what about me?"})
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert "error" in refused.json()
            assert (await app.browser.get("/healthz")).json() == {"workers": 1, "backlog": {MODEL: 1}}
            assert (await app.browser.post(f"/chats/{waiting}/cancel")).json() == {"outcome": "cancelled"}
            await app.browser.post(f"/chats/{running}/cancel")
            await heard.to_the_end()


@kinds
async def test_a_worker_that_fell_silent_is_not_counted(
    kind: str, redis_url: str, client: redis.asyncio.Redis, folder: Path
) -> None:
    report = {"worker": "killed", "model": MODEL, "heartbeat_ms": 5000}
    now_s, _ = await client.time()
    await client.set(KEYS.worker("killed"), json.dumps(report), ex=60)
    async with web_app(kind, redis_url, folder) as app:
        for age_s, number in ((0, 1), (14, 0)):
            await client.zadd(KEYS.workers, {"killed": (now_s - age_s) * 1000})
            assert (await app.browser.get("/healthz")).json() == {"workers": number, "backlog": {MODEL: 0}}


@kinds
async def test_what_cannot_be_served_has_a_status(kind: str, redis_url: str, folder: Path) -> None:
    async with web_app(kind, redis_url, folder) as app:
        nobody = await app.browser.post("/chats", json={"message": "Hello"})
        assert nobody.status_code == 503  # no model is served, and none was named
        async with scripted_worker(redis_url):
            for wrong in (
                {},
                {"message": ""},
                {"message": "Hello", "max_tokens": 0},
                {"message": ["Hello"]},
                ["Hello"],
            ):
                assert (await app.browser.post("/chats", json=wrong)).status_code == 422, wrong
            chat = await app.ask("Hello", max_tokens=3)
            assert (await app.browser.get("/chats/nobody/events")).status_code == 404
            assert (await app.browser.get("/chats/not*an*id/events")).status_code == 422
            here = {"Last-Event-ID": "somewhere"}
            assert (await app.browser.get(f"/chats/{chat}/events", headers=here)).status_code == 422
            assert (await app.browser.post("/chats/nobody/cancel")).json() == {"outcome": "unknown"}
            async with app.listen(chat) as heard:
                await heard.to_the_end()


@kinds
async def test_a_chat_waits_for_a_worker(kind: str, redis_url: str, folder: Path) -> None:
    async with web_app(kind, redis_url, folder, INFERQ_MODEL=MODEL) as app:
        chat = await app.ask("Hello", max_tokens=3)
        async with app.listen(chat) as heard:
            async for _ in heard:
                if heard.events and heard.events[-1][0] == "no_worker":
                    break
            assert heard.events[-1] == ("no_worker", {"type": "no_worker", "model": MODEL})
            async with scripted_worker(redis_url):
                await heard.to_the_end()
        assert tokens_of(heard.events) == chat_answer("Hello", 3)


@kinds
async def test_without_redis_it_is_not_healthy(kind: str, folder: Path) -> None:
    async with web_app(kind, f"unix://{folder}/nothing.sock", folder, INFERQ_MODEL=MODEL) as app:
        assert (await app.browser.get("/healthz")).status_code == 503
        assert (await app.browser.post("/chats", json={"message": "Hello"})).status_code == 503
        assert (await app.browser.get("/chats/some/events")).status_code == 503
