"""The page in a real browser: an answer survives a reload and the end of the instance that streams it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis.asyncio
from support.chromium import chromium, needs_chromium
from support.queue import KEYS, scripted_worker
from support.streams import until_ended
from support.web_apps import app_by_tcp, chat_answer

pytestmark = [needs_chromium, pytest.mark.slow(family="examples", share=0.25)]

SEND = "document.getElementById('message').value = {!r}; document.getElementById('send').click()"
ANSWER = "document.getElementById('answer').textContent"
STATE = "document.getElementById('state').textContent"
CHAT = "location.hash.slice(1)"


@pytest.mark.timeout(240)
async def test_an_answer_survives_a_reload_and_its_instance(
    redis_url: str, client: redis.asyncio.Redis, folder: Path
) -> None:
    async with scripted_worker(redis_url, engine=["--step-ms", "50"]), chromium() as page:
        async with app_by_tcp(redis_url, folder) as (first, port):
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until("!!document.getElementById('send')")
            await page.evaluate(SEND.format("Tell me much"))
            await page.until(f"{ANSWER}.length >= 20")
            await page.evaluate("window.wasHere = true; location.reload()")
            await page.until(f"!window.wasHere && {ANSWER}.length >= 40")
            assert await page.evaluate("document.getElementById('question').textContent") == "Tell me much"
            await page.evaluate("window.wasHere = true")
            first.kill()
            await page.until(f"{STATE} === 'reconnecting'")
        async with app_by_tcp(redis_url, folder, port):
            await page.until(f"{STATE}.startsWith('length')")
            assert (await page.evaluate(ANSWER)).encode() == bytes(chat_answer("Tell me much", 256))
            assert await page.evaluate("window.wasHere"), "no page was loaded again"
            await page.evaluate(SEND.format("And what else?"))
            await page.until(f"{STATE}.startsWith('running') && {ANSWER}.length >= 10")
            if picture := os.environ.get("INFERQ_TEST_PICTURE"):
                await page.picture(Path(picture))
            await page.evaluate("document.getElementById('stop').click()")
            await page.until(f"{STATE}.startsWith('cancelled')")
            assert not await page.evaluate("document.getElementById('send').disabled")
            found = await until_ended(client, KEYS, await page.evaluate(CHAT))
            assert found[-1].finish_reasons == ("cancelled",)
            await page.evaluate("history.back()")
            await page.until(f"{ANSWER}.length === 256")


@pytest.mark.timeout(240)
async def test_what_is_refused_is_said(redis_url: str, folder: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-backlog", "1")
    async with scripted_worker(redis_url, *flags, engine=["--step-ms", "100"]), chromium() as page:
        async with app_by_tcp(redis_url, folder) as (_, port):
            await page.open(f"http://127.0.0.1:{port}/#nobody")
            await page.until(f"{STATE}.includes('unknown here')")
            for question in ("One", "Two"):
                await page.evaluate(SEND.format(question))
                await page.until(f"document.getElementById('question').textContent === {question!r}")
                await page.until(f"{STATE} === 'waiting for a worker'" if question == "Two" else f"{ANSWER}.length")
                await page.evaluate("document.getElementById('send').disabled = false")
            await page.evaluate(SEND.format("Three"))
            await page.until(f"/try again in \\d+ s/.test({STATE})")
