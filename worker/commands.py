"""What a worker does to the jobs, one script a command: claim, renew, publish, finish, ...; and its sign of life.

Knows the scripts' arguments and answers; what they do stands in the scripts themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

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


_OUTCOMES: Final = {outcome.encode(): outcome for outcome in Outcome}


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job that this worker owns now. The last entry of its stream is its `started`, `{epoch}-0`.

    `attempt` counts from 1; `queue_ms` is the time until its first start. If it was `resumed`, others had it before,
    and `resumed_tokens` says how many tokens of each choice they have published. `estimate` says how many tokens it may
    come to hold, prompt and answer, before anybody has tokenized it.
    """

    request_id: str
    token: str
    epoch: int
    generation: int
    attempt: int
    payload: bytes
    queue_ms: float
    expires_at_ms: int | None
    resumed: bool = False
    resumed_tokens: tuple[int, ...] = (0,)
    signature: str = ""
    estimate: int = 0

    @property
    def entry_id(self) -> str:
        return f"{self.epoch}-0"


@dataclass(frozen=True, slots=True)
class Reacquired:
    """A job that its owner has again, in the same attempt: the stream's last entry is `started`, `{epoch}-0`."""

    epoch: int
    resumed_tokens: tuple[int, ...]

    @property
    def entry_id(self) -> str:
        return f"{self.epoch}-0"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """That a job failed for a reason that somebody should look into: the code of its `failed`, never any text."""

    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """Of the renewed requests: those that somebody cancelled, and those that are no longer this worker's."""

    cancelled: list[str]
    lost: list[str]


class Entry(NamedTuple):
    """A stream entry on its way: it is appended if the owner's lease holds and `expected_id` is the last entry.

    Frozen: a retry carries the same bytes, which is how the script knows its own repeat. The fields are what the
    scripts take, in their order.
    """

    request_id: str
    token: str
    expected_id: str
    entry_id: str
    type: str
    data: str


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
        takeover: bool,
        max_attempts: int,
        accept_plain: bool,
        exclude: Collection[str] = (),
        grace_end_ms: int = 0,
        asked_at_ms: int | None = None,
        free_blocks: int | None = None,
        block_size: int = 1,
        largest_request: int | None = None,
        running_here: int = 0,
        lost_tokens: Collection[str] = (),
    ) -> list[Claimed]:
        """Take up to `slots` jobs; `token` must be new for each call.

        With `takeover` those come first whose lease has ended. That costs them an attempt, unless it ended before
        `grace_end_ms` (Redis' time; a worker that had lost Redis takes over nothing for one lease length, and this is
        its end); with their last attempt they fail, as dead letters. A call that was asked at `asked_at_ms` and comes
        more than half a lease later takes over nothing: the server was stalled, and owners could not renew either.

        Then come waiting jobs, in order. A job whose estimate is over `free_blocks`, of `block_size` tokens, is not
        taken and not overtaken, unless it would be the only one here. None: blocks are not counted. An estimate over
        `largest_request`, the most tokens that any request may have, is wrong, or the job will be refused as soon as
        its tokens are known: it waits for one block, and has those of the largest request once it is taken.

        What is cancelled, past its deadline, without a payload or broken is ended on the way. Ids in `exclude`, those
        that this worker still runs, are passed by.
        No further job is taken once the payloads have MAX_CLAIM_BYTES together. `lost_tokens` are those of earlier
        calls whose reply did not come: what they took comes first, in the same attempt.
        """
        blocks = (_or_empty(free_blocks), block_size, _or_empty(largest_request))
        rules = (int(takeover), grace_end_ms, _or_empty(asked_at_ms), max_attempts, int(accept_plain))
        ids = (",".join(lost_tokens), *exclude)
        answer = await self._scripts.run("claim", worker, token, lease_ms, slots, *blocks, running_here, *rules, *ids)
        return [_read_claimed(token, *each) for each in answer]

    async def reacquire(
        self, request_id: str, *, token: str, generation: int, epoch: int, worker: str, lease_ms: int
    ) -> Reacquired | None:
        """Get a job back whose lease has ended under its owner, or whose stream has lost its end; None: drop it.

        `epoch` is the owner's last one, `generation` the job's that it has claimed. A repeat of a call whose reply was
        lost takes one more epoch.
        """
        answer = await self._scripts.run("reacquire", request_id, token, generation, epoch, worker, lease_ms)
        if answer is None:
            return None
        new_epoch, counts = answer
        return Reacquired(int(new_epoch), tuple(map(int, counts)))

    async def hand_back(self, request_id: str, *, token: str, expected_id: str) -> Outcome:
        """Let the job wait again, at its old place and with what it has published; it costs no attempt.

        A job that is cancelled or past its deadline ends instead. `expected_id` is the owner's last entry.
        """
        answer = await self._scripts.run("handback", request_id, token, expected_id)
        return _OUTCOMES[answer]

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
            answer = await self._scripts.run("publish", *chain.from_iterable(batch))
            outcomes += [_OUTCOMES[each] for each in answer]
        return outcomes

    async def finish(self, *entries: Entry, dead: DeadLetter | None = None) -> Outcome:
        """Append what was not published yet and the terminal entry, the last one, and remove the job.

        On a full server too: it deletes before it writes. Entries that stand in the stream already are passed by.
        With `dead` a dead letter is written, and the payload is kept for a week.
        """
        letter = (dead.reason, dead.attempts) if dead else ("", "")
        answer = await self._scripts.run("finish", *letter, *chain.from_iterable(entries))
        return _OUTCOMES[answer]

    async def beat(self, worker: str, card: str, state: str, *, ttl_ms: int) -> None:
        """Show the worker and what it serves for the next `ttl_ms`. On a full server too."""
        await self._scripts.run("beat", worker, card, state, ttl_ms)


def _or_empty(number: int | None) -> int | str:
    """As a script gets it."""
    return "" if number is None else number


def _read_claimed(
    token: str,
    request_id: bytes,
    epoch: bytes,
    generation: bytes,
    attempt: int,
    payload: bytes,
    queue_ms: bytes,
    expires_at_ms: bytes,
    resumed: int,
    counts: list[int],
    signature: bytes,
    estimate: bytes,
) -> Claimed:
    return Claimed(
        request_id=request_id.decode(),
        token=token,
        epoch=int(epoch),
        generation=int(generation),
        attempt=int(attempt),
        payload=payload,
        queue_ms=float(queue_ms),
        expires_at_ms=int(expires_at_ms) if expires_at_ms else None,
        resumed=bool(resumed),
        resumed_tokens=tuple(map(int, counts)),
        signature=signature.decode(errors="replace"),
        estimate=int(estimate),
    )
