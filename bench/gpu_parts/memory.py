"""Which exceptions say that there was no memory: what there is none for is left out, and is nobody's fault."""

from __future__ import annotations

from inferq.cuda.memory import MemoryShortageError, is_shortage
from inferq.engine.assets import first_line


def memory_shortage(exc: Exception) -> str | None:
    """In a line what there was no memory for, if that is why `exc` was raised; None otherwise."""
    cause: BaseException | None = exc
    while cause is not None:
        if is_shortage(cause) or isinstance(cause, MemoryShortageError):
            return first_line(exc)
        cause = cause.__cause__
    return None
