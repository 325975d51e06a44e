"""How long to wait before the next try of what Redis did not answer. Both sides of the queue wait in this way."""

from __future__ import annotations

import random


class Backoff:
    """Seconds between tries: doubling up to a bound, each between half and the whole of its step.

    The random part keeps those apart who lost the same server at the same moment.
    """

    def __init__(self, *, first: float = 0.05, bound: float = 1.0) -> None:
        self._first = first
        self._bound = bound
        self._step = first

    def next(self) -> float:
        step, self._step = self._step, min(self._step * 2, self._bound)
        return step * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """After a try that got through."""
        self._step = self._first
