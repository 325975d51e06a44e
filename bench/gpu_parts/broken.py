"""Which exceptions say that the device cannot be used any more in this process: whatever came after would be false."""

from __future__ import annotations

from inferq.cuda.graph import BrokenDeviceError


def device_is_broken(exc: BaseException) -> bool:
    """Whether `exc`, or what it was raised from, is a recording that took the device with it."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, BrokenDeviceError):
            return True
        cause = cause.__cause__
    return False
