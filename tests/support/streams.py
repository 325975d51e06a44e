"""A stream as it stands in Redis, read without the client: what the wire itself says."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from inferq.producer.contract import Keys
from inferq.producer.events import TERMINAL_TYPES, Delta, Event, decode_event

from .waiting import wait_until


async def events(client: redis.asyncio.Redis, keys: Keys, request_id: str) -> list[Event]:
    entries = await client.xrange(keys.events(request_id))
    return [event for _, fields in entries if (event := decode_event(fields)) is not None]


async def until_ended(client: redis.asyncio.Redis, keys: Keys, request_id: str, *, timeout: float = 30.0) -> list[Any]:
    """All events of the stream, once its last one is a terminal one. Fails if it has another terminal event."""

    async def ended() -> list[Event] | None:
        found = await events(client, keys, request_id)
        return found if found and found[-1].type in TERMINAL_TYPES else None

    found = await wait_until(ended, timeout=timeout, what=f"the stream of {request_id} has ended")
    assert [event.type in TERMINAL_TYPES for event in found].count(True) == 1
    return found


async def until_delta(client: redis.asyncio.Redis, keys: Keys, request_id: str, *, at_least: int = 1) -> None:
    """Return when the stream has so many tokens."""

    async def has() -> bool:
        found = await events(client, keys, request_id)
        return sum(len(event.token_ids) for event in found if isinstance(event, Delta)) >= at_least

    await wait_until(has, what=f"{request_id} has {at_least} tokens")


def text_of(found: list[Any]) -> str:
    return "".join(event.text for event in found if isinstance(event, Delta))


def tokens_of(found: list[Any]) -> list[int]:
    return [token for event in found if isinstance(event, Delta) for token in event.token_ids]


def assert_unbroken(found: list[Any], text: str) -> None:
    """The deltas fit together without a hole or a repeat, whatever epochs they are of, and say this text.

    A token of the scripted engine is a byte.
    """
    tokens = chars = 0
    for event in found:
        if isinstance(event, Delta):
            assert (event.index, event.at) == (tokens, chars)
            tokens, chars = tokens + len(event.token_ids), chars + len(event.text)
    assert text_of(found) == text
    assert bytes(tokens_of(found)).decode() == text


def starts_of(found: list[Any]) -> list[tuple[int, int]]:
    """Of each `started`: the attempt, and the tokens that were there."""
    return [(event.attempt, event.resumed_tokens[0]) for event in found if event.type == "started"]
