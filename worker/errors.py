"""The ways in which a request ends badly that are the worker's own; the engine's are in `inferq.engine.errors`."""

from __future__ import annotations


class BadPayload(Exception):
    """What stood in Redis is not a job of ours; the message says why, without quoting it."""


class Dropped(Exception):
    """The request is somebody else's now, or nobody's: nothing more is written."""


class ShuttingDown(Exception):
    """The worker ends before the request does."""


class RedisFull(Exception):
    """The server has refused for too long what the request has to say."""
