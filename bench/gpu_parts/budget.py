"""The time that a run may take: its parts begin in order, and what is left out is named in a line.

Standard library only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping


class TimeBudget:
    """`seconds` from now, of which each of `reserves` (part: seconds) is kept for its part until that has begun.

    What a part leaves over is the next one's. `skipped` names what was left out, and why.
    """

    def __init__(
        self, seconds: float, reserves: Mapping[str, float], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._reserves = dict(reserves)
        self._part_end = self._end
        self.part = ""
        self.skipped: list[str] = []

    def begin(self, part: str) -> None:
        """From here on the time is that of `part`, one of the reserves; parts that have not begun keep theirs."""
        del self._reserves[part]
        self.part = part
        self._part_end = self._end - sum(self._reserves.values())

    @property
    def left(self) -> float:
        """Seconds until this part must have ended."""
        return self._part_end - self._clock()

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `what`, which takes about that long, fits into the rest of this part; if not, that is said."""
        if self.left >= seconds:
            return True
        self.skip(what, f"no time left in this part ({max(0.0, self.left):.0f} s, about {seconds:.0f} s needed)")
        return False

    def skip(self, what: str, why: str) -> None:
        line = f"{self.part}: {what}: {why}"
        self.skipped.append(line)
        print(f"skipped: {line}", flush=True)


def end_after(seconds: float, expire: Callable[[], None]) -> threading.Timer:
    """Calls `expire` in a thread of its own if the returned timer is not cancelled in time.

    A call into the driver that does not come back cannot be interrupted, so `expire` has to end the process.
    """
    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    return timer
