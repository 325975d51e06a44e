"""Whether a child that has died is started again, and when: plain policy, which starts nothing itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How the engine's process is supervised.

    A death is fruitless if no token was generated since the process was ready. Each fruitless one doubles the wait
    before the next start; more than `max_restarts` of them within the window, and the engine is dead for good.
    `step_timeout_seconds` is how long the process may say nothing although it was asked, as it does during a step;
    None lets a step take for ever. The first load is not timed; later ones may take that long and ten times the first.
    """

    max_restarts: int = 6
    window_seconds: float = 600.0
    backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0
    step_timeout_seconds: float | None = 120.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, not {self.max_restarts}")
        for name in ("window_seconds", "step_timeout_seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if not 0 <= self.backoff_seconds <= self.max_backoff_seconds:
            raise ValueError(f"backoff_seconds must be between 0 and max_backoff_seconds, not {self.backoff_seconds}")


class RestartBudget:
    """Counts deaths against a policy."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._fruitless: deque[float] = deque()

    def after_death(self, *, fruitful: bool) -> float | None:
        """How many seconds to wait before the next start; None: start no more."""
        policy, now = self._policy, self._clock()
        if fruitful:
            self._fruitless.clear()
            return 0.0 if policy.max_restarts else None
        while self._fruitless and self._fruitless[0] < now - policy.window_seconds:
            self._fruitless.popleft()
        self._fruitless.append(now)
        if len(self._fruitless) > policy.max_restarts:
            return None
        # The exponent is bounded, for numbers of restarts that no float could express.
        doubled: float = policy.backoff_seconds * 2 ** min(len(self._fruitless) - 1, 64)
        return min(doubled, policy.max_backoff_seconds)
