"""What a worker does to the jobs, one script a command: claim, renew, publish, finish; and its sign of life.

Knows the scripts' arguments and answers; what they do stands in the scripts themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferq.producer.contract import Keys
from inferq.producer.lua import ScriptRunner

if TYPE_CHECKING:
    from redis.asyncio import Redis

_SCRIPTS: Final = Path(__file__).with_name("scripts")
#: A script blocks the server while it runs: so many entries are about 3 ms.
MAX_ENTRIES_PER_CALL: Final = 256


class Outcome(StrEnum):
    """What became of an entry."""

    OK = "ok"  #: it stands in the stream, by this call or by an earlier one whose reply was lost
    FENCED = "fenced"  #: the lease is somebody else's, or nobody's: drop the request
    MOVED = "moved"  #: the lease holds, but the stream does not end where the owner thinks


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job that this worker owns now. The last entry of its stream is its `started`, `{epoch}-0`."""

    request_id: str
    token: str
    epoch: int
    generation: int
    attempt: int
    payload: bytes
    queue_ms: float
    expires_at_ms: int | None

    @property
    def entry_id(self) -> str:
        return f"{self.epoch}-0"


@dataclass(frozen=True, slots=True)
class Renewed:
    """Of the renewed requests: those that somebody cancelled, and those that are no longer this worker's."""

    cancelled: list[str]
    lost: list[str]


@dataclass(frozen=True, slots=True)
class Entry:
    """A stream entry on its way: it is appended if the owner's lease holds and `expected_id` is the last entry.

    Frozen: a retry carries the same bytes, which is how the script knows its own repeat.
    """

    request_id: str
    token: str
    expected_id: str
    entry_id: str
    type: str
    data: str

    def arguments(self) -> tuple[str, ...]:
        return self.request_id, self.token, self.expected_id, self.entry_id, self.type, self.data


class WorkerCommands:
    """The worker's scripts, for one served model."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._scripts = ScriptRunner(redis, keys, _SCRIPTS)

    async def claim(
        self,
        *,
        worker: str,
        token: str,
        lease_ms: int,
        slots: int,
        sweep: bool,
        accept_plain: bool,
        exclude: Collection[str] = (),
    ) -> list[Claimed]:
        """Take up to `slots` waiting jobs, first come first served; `token` must be new for each call.

        What is cancelled, past its deadline, without a payload or broken is ended on the way; with `sweep` also what
        stands in `running` without a lease. Ids in `exclude`, those that this worker still runs, are passed by.
        No further job is taken once the payloads have MAX_CLAIM_BYTES together.
        """
        flags = (int(sweep), int(accept_plain))
        answer = await self._scripts.run("claim", worker, token, lease_ms, slots, *flags, *exclude)
        return [
            Claimed(
                request_id=request_id.decode(),
                token=token,
                epoch=int(epoch),
                generation=int(generation),
                attempt=int(attempt),
                payload=payload,
                queue_ms=float(queue_ms),
                expires_at_ms=int(expires_at_ms) if expires_at_ms else None,
            )
            for request_id, epoch, generation, attempt, payload, queue_ms, expires_at_ms in answer
        ]

    async def renew(self, owned: Sequence[tuple[str, str]], *, lease_ms: int) -> Renewed:
        """Renew the leases of `(request_id, token)` pairs, and learn what happened to them meanwhile."""
        pairs = (part for pair in owned for part in pair)
        cancelled, lost = await self._scripts.run("renew", lease_ms, *pairs)
        return Renewed([each.decode() for each in cancelled], [each.decode() for each in lost])

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Append the entries, of any number of requests, in order; the outcome of each.

        Raises redis.exceptions.OutOfMemoryError when the server is full, with nothing written if there were no more
        than MAX_ENTRIES_PER_CALL; the same entries may be sent again.
        """
        outcomes: list[Outcome] = []
        for start in range(0, len(entries), MAX_ENTRIES_PER_CALL):
            batch = entries[start : start + MAX_ENTRIES_PER_CALL]
            arguments = (part for entry in batch for part in entry.arguments())
            answer = await self._scripts.run("publish", *arguments)
            outcomes += [Outcome(each.decode()) for each in answer]
        return outcomes

    async def finish(self, *entries: Entry) -> Outcome:
        """Append what was not published yet and the terminal entry, the last one, and remove the job.

        On a full server too: it deletes before it writes. Entries that stand in the stream already are passed by.
        """
        answer = await self._scripts.run("finish", *(part for entry in entries for part in entry.arguments()))
        return Outcome(answer.decode())

    async def beat(self, worker: str, card: str, state: str, *, ttl_ms: int) -> None:
        """Show the worker and what it serves for the next `ttl_ms`. On a full server too."""
        await self._scripts.run("beat", worker, card, state, ttl_ms)
