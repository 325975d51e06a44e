"""Commands and replies that get lost between a worker, its readers and the server: nothing is repeated or missed."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from support.cutting_proxy import cutting_proxy
from support.queue import KEYS, MODEL, answer_to, left_over, scripted_worker
from support.servers import valkey
from support.streams import assert_unbroken, starts_of, until_ended

from inferq.producer import InferenceClient
from inferq.producer.events import TERMINAL_TYPES, Event

NUM_TOKENS = 200


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))])
async def test_every_reader_gets_every_token_once(seed: int) -> None:
    with valkey() as url:
        async with cutting_proxy(url, one_in=12, seed=seed) as proxy, redis.asyncio.Redis.from_url(url) as client:
            async with (
                scripted_worker(proxy.url, "--lease-seconds", "2", "--max-num-seqs", "16", engine=["--step-ms", "5"]),
                InferenceClient.from_url(url, model=MODEL) as producer,
                InferenceClient.from_url(proxy.url, model=MODEL) as reader,
            ):
                proxy.armed = True
                prompts = [f"job {number}" for number in range(24)]
                ids = [await producer.submit(prompt, sampling={"max_tokens": NUM_TOKENS}) for prompt in prompts]
                read = await asyncio.gather(*(_read(reader, request_id) for request_id in ids))
                for prompt, request_id, seen in zip(prompts, ids, read, strict=True):
                    found = await until_ended(client, KEYS, request_id)
                    for events in (found, seen):
                        assert_unbroken(events, answer_to(prompt, NUM_TOKENS))
                        assert [event.type for event in events if event.type in TERMINAL_TYPES] == ["finished"]
                    assert {attempt for attempt, _ in starts_of(found)} == {1}
                assert await left_over(client) == set()
                assert proxy.lost_replies["evalsha"] > 0 and proxy.lost_commands["evalsha"] > 0
                proxy.armed = False


async def _read(reader: InferenceClient, request_id: str) -> list[Event]:
    return [event async for event in reader.stream(request_id)]
