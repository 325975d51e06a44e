"""Getting a stream back: after a lease that lapsed under its living owner, or a server that lost the stream's tail.

The owner asks for the job again, in the same attempt and in a new epoch, and sends what the stream lacks. If the job
is somebody else's by then, or has ended, nothing that anybody can see is changed. Knows commands and outboxes; knows
neither the engine nor how the loss was noticed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Never, Protocol

from inferq.producer.contract import Keys

from .background import REDIS_ERRORS, Outage, is_refused, reason_of
from .commands import Outcome, Reacquired
from .errors import Dropped
from .log import get_logger
from .outbox import Hold, Outbox
from .progress import BrokenStream, Progress, Ranges, read_progress
from .publisher import Publisher

_log: Any = get_logger("recovery")


class Reacquires(Protocol):
    """The commands by which a job is got back, or given away; WorkerCommands has them."""

    async def reacquire(
        self, request_id: str, *, token: str, generation: int, epoch: int, worker: str, lease_ms: int
    ) -> Reacquired | None: ...

    async def hand_back(self, request_id: str, *, token: str, expected_id: str) -> Outcome: ...


class Owner(Protocol):
    """A request whose outbox may be lost."""

    @property
    def outbox(self) -> Outbox: ...

    def drop(self, why: str) -> None: ...


class Recovery:
    """Reads streams, and gets lost ones back, one after the other; `run` is its one task."""

    def __init__(
        self, commands: Reacquires, publisher: Publisher, redis: Ranges, keys: Keys, *, worker: str, lease_ms: int
    ) -> None:
        self._commands = commands
        self._publisher = publisher
        self._redis = redis
        self._keys = keys
        self._worker = worker
        self._lease_ms = lease_ms
        self._lost: dict[Owner, None] = {}
        self._wake = asyncio.Event()

    async def read(self, request_id: str) -> Progress:
        """What the stream holds, as soon as Redis says it. Raises BrokenStream, and Dropped if it does not for long."""
        outage = Outage("recovery", vital=False)
        while True:
            try:
                progress = await read_progress(self._redis, self._keys, request_id)
            except REDIS_ERRORS as exc:
                if is_refused(exc):
                    raise BrokenStream("Redis refuses to read it") from None
                delay = outage.failed(exc)
                if outage.is_stuck:
                    raise Dropped(f"Redis refuses to read it: {reason_of(exc)}") from None
                await asyncio.sleep(delay)
            else:
                outage.over()
                return progress

    def get_back(self, owner: Owner) -> None:
        """Take the request up, whose outbox was just lost. Never waits."""
        self._lost[owner] = None
        self._wake.set()

    async def run(self) -> Never:
        outage = Outage("recovery")
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._lost:
                owner = next(iter(self._lost))
                del self._lost[owner]
                try:
                    await self._get_back(owner)
                except REDIS_ERRORS as exc:
                    delay = 0.0 if is_refused(exc) else outage.failed(exc)
                    if is_refused(exc) or outage.is_stuck:
                        owner.drop(f"Redis refuses to give it back: {reason_of(exc)}")
                    else:
                        self._lost[owner] = None
                        await asyncio.sleep(delay)
                else:
                    outage.over()

    async def _get_back(self, owner: Owner) -> None:
        outbox = owner.outbox
        if outbox.hold is not Hold.LOST:  # it was dropped meanwhile
            return
        got = await self._commands.reacquire(
            outbox.request_id,
            token=outbox.token,
            generation=outbox.generation,
            epoch=outbox.epoch,
            worker=self._worker,
            lease_ms=self._lease_ms,
        )
        if got is None:
            owner.drop("lease lost")
            return
        # From here on a repeat of the command is the holder's own, whatever happens to this call.
        outbox.epoch = got.epoch
        try:
            progress = await read_progress(self._redis, self._keys, outbox.request_id)
        except BrokenStream:
            progress = None
        if progress is not None and outbox.restart(got.epoch, progress):
            _log.info("request.reacquired", request_id=outbox.request_id, tokens=len(progress.token_ids))
            self._publisher.wake(outbox)
        else:
            # The stream holds what was not made here: whoever claims the job next goes on from that.
            await self._commands.hand_back(outbox.request_id, token=outbox.token, expected_id=f"{got.epoch}-0")
            owner.drop("the stream holds more than was made here")
