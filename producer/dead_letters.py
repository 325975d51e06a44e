"""Jobs that failed for a reason that somebody should look into: which they are, and what they asked for.

A dead letter says id, reason and attempts, never text; the payload stands under a key of its own for a week. Knows
how both are read; they are written by the worker's scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from .contract import DEAD_LENGTH, Keys, decode_json
from .errors import InvalidRequest, UnknownRequest
from .requests import GenerateRequest

if TYPE_CHECKING:
    from redis.asyncio import Redis

#: Entries of one XREVRANGE while a letter is looked for.
_PAGE: Final = 500
#: The year 9999, the last one that dates have: an id that somebody has set ahead is that of all letters behind it.
_LAST_MS: Final = 253_402_300_799_999


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`reason` is the code of the `failed` event, `died_at_ms` Redis' time, `signature` the job's, if it had one."""

    request_id: str
    reason: str
    attempts: int
    died_at_ms: int
    entry_id: str
    signature: str = ""


async def read_dead_letters(redis: Redis, keys: Keys, limit: int) -> list[DeadLetter]:
    """The letters among the stream's last `limit` entries, the latest first."""
    entries = await redis.xrevrange(keys.dead, count=limit)
    return [letter for entry_id, fields in entries if (letter := _letter(entry_id.decode(), fields)) is not None]


async def find_dead_letter(redis: Redis, keys: Keys, request_id: str) -> DeadLetter:
    """The last letter of that id. Raises UnknownRequest."""
    before = "+"
    for _ in range(-(-DEAD_LENGTH // _PAGE) + 1):
        entries = await redis.xrevrange(keys.dead, before, count=_PAGE)
        for entry_id, fields in entries:
            letter = _letter(entry_id.decode(), fields)
            if letter is not None and letter.request_id == request_id:
                return letter
        if len(entries) < _PAGE:
            break
        before = f"({entries[-1][0].decode()}"
    raise UnknownRequest(f"no dead letter of {keys.model!r} has the id {request_id!r}")


async def read_dead_payload(redis: Redis, keys: Keys, request_id: str) -> bytes | None:
    payload: bytes | None = await redis.get(keys.dead_payload(request_id))
    return payload


def request_of(payload: bytes) -> GenerateRequest:
    """The request that a payload holds. Raises InvalidRequest, without a word of what it says."""
    try:
        call = decode_json(payload)
        (arguments,) = call["a"]
        return GenerateRequest.model_validate(arguments)
    except (ValueError, LookupError, TypeError, RecursionError, ValidationError):
        problem = InvalidRequest("the payload of the dead letter is not a request")
    raise problem  # outside of the handler: pydantic's own message holds the prompt


def _letter(entry_id: str, fields: dict[bytes, Any]) -> DeadLetter | None:
    """None for an entry that no script of ours has written."""
    try:
        return DeadLetter(
            request_id=fields[b"id"].decode(errors="replace"),
            reason=fields[b"reason"].decode(),
            attempts=int(fields[b"attempts"]),
            died_at_ms=min(int(entry_id.partition("-")[0]), _LAST_MS),
            entry_id=entry_id,
            signature=fields.get(b"signature", b"").decode(errors="replace"),
        )
    except (KeyError, ValueError):
        return None
