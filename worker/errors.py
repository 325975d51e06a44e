"""The ways in which a request ends badly that are the worker's own; the engine's are in `inferq.engine.errors`."""

from __future__ import annotations


class BadPayload(Exception):
    """What stood in Redis is not a job of ours; the message says why, without quoting it."""


class Dropped(Exception):
    """The request is somebody else's now, or nobody's: nothing more is written."""


class RedisRefuses(Exception):
    """Redis answers a part of the worker, and will never let it do its work; the message says which and why."""

    def __init__(self, role: str, reason: str) -> None:
        super().__init__(f"{role}: {reason}")
        self.role = role
        self.reason = reason


class ServerFull(Exception):
    """Redis has been full for so long that the request is given up."""


class ShuttingDown(Exception):
    """The worker ends before the request does."""
