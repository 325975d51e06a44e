"""Keeping the leases of running requests, and hearing on the way which of them were cancelled or are lost.

One script for all requests, every third of the lease. The cancellation's doorbell asks the same script at once, for
one request: there is one way only in which a cancellation is learned. Knows nothing of what a request does then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from .commands import Renewed


class Renews(Protocol):
    """The command that renews; WorkerCommands has it."""

    async def renew(self, owned: Sequence[tuple[str, str]], *, lease_ms: int) -> Renewed: ...


class Leased(Protocol):
    """A request under a lease. Both calls may come more than once, and after it has ended by itself."""

    @property
    def token(self) -> str: ...

    def cancel(self) -> None: ...

    def lose(self, why: str) -> None: ...


class Leases:
    def __init__(self, commands: Renews, running: Mapping[str, Leased], lease_ms: int) -> None:
        self._commands = commands
        self._running = running
        self._lease_ms = lease_ms

    async def renew(self, request_ids: Collection[str] | None = None) -> None:
        """Renew those of the named requests that run here; all of them by default. Raises redis-py's errors."""
        names = self._running if request_ids is None else self._running.keys() & set(request_ids)
        # The requests as they are now: an id may stand for another request when the answer comes.
        owned = {name: self._running[name] for name in names}
        if not owned:
            return
        answer = await self._commands.renew([(n, r.token) for n, r in owned.items()], lease_ms=self._lease_ms)
        for request_id in answer.lost:
            owned[request_id].lose("the lease has lapsed")
        for request_id in answer.cancelled:
            owned[request_id].cancel()
