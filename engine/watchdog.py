"""Noticing that the child has fallen silent.

Asked in between, a child answers before its next step; what it sends by itself counts as well. Silence is counted in
turns of this process' own clock: if both processes were stopped for an hour, that was one turn. Knows no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_TURNS: Final = 4


class Watchdog:
    """`ask` makes a child that is alive say something, whenever no step runs; `heard` is called for each word."""

    def __init__(self, timeout_seconds: float, ask: Callable[[], None]) -> None:
        self._turn_seconds = timeout_seconds / _TURNS
        self._ask = ask
        self._silent_turns = 0

    def heard(self) -> None:
        self._silent_turns = 0

    async def run(self) -> None:
        """Return after a silence of the timeout, or up to a quarter longer."""
        # The first turn may have begun just before the silence did.
        while self._silent_turns <= _TURNS:
            await asyncio.sleep(self._turn_seconds)
            self._silent_turns += 1
            self._ask()
