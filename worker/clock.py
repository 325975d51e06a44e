"""Redis' time, by this machine's monotonic clock: every time on the wire is Redis' own."""

from __future__ import annotations

import time


class RedisClock:
    """Holds the difference as last measured. Before the first measurement it raises RuntimeError."""

    def __init__(self) -> None:
        self._offset_ms: float | None = None

    def measured(self, asked: float, answered: float, redis_time: tuple[int, int]) -> None:
        """Take an answer to TIME (seconds, microseconds), asked and answered at those `time.monotonic()`."""
        seconds, microseconds = redis_time
        self._offset_ms = seconds * 1000 + microseconds / 1000 - (asked + answered) * 500

    def now_ms(self) -> float:
        return self.ms_at(time.monotonic())

    def ms_at(self, monotonic: float) -> float:
        """Redis' time at a moment of `time.monotonic()`."""
        if self._offset_ms is None:
            raise RuntimeError("Redis was not asked for its time yet")
        return monotonic * 1000 + self._offset_ms

    def seconds_until(self, redis_ms: float) -> float:
        """Negative for a time that has passed."""
        return (redis_ms - self.now_ms()) / 1000
