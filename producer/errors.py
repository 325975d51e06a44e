"""Every error that a producer can meet, as one tree.

InferqError
├── InvalidRequest            the request itself is wrong; nothing was written
├── QueueFull                 the backlog has reached its bound; try again after `retry_after_seconds`
├── DuplicateRequest          a job of that id is alive
├── IdempotencyConflict       another request was sent under the same idempotency key
├── NotDurable                the server cannot, or did not in time, make a submission safe against its own loss
├── UnknownModel              no model was named, and there is not exactly one live one
├── UnknownRequest            nothing is known under that id
├── JobLost                   the stream is gone while somebody read it
├── RequestReplaced           another job has begun under the id while somebody read it
├── RedisUnavailable          Redis is away, or refuses the command
├── UnsuitableConnection      the Redis client cannot be used: decoded responses, another serializer, a bad URL
├── InvalidSigningKey         the keys that jobs are signed with cannot be used
├── Unsigned                  a dead letter has no signature by one of the keys, and so is not signed anew
└── RequestFailed             the job ended in `failed`; `code` says why
    ├── RequestRefused        invalid_request, bad_payload, unsigned: sending it again is no use
    └── EngineFailure         the others: the service's fault
"""

from __future__ import annotations

from .events import ErrorCode, Failed


class InferqError(Exception):
    """The root of everything that inferq raises to a producer."""


class InvalidRequest(InferqError, ValueError):
    """The request breaks a limit or has a wrong field; the message names it. Nothing was written."""


class QueueFull(InferqError):
    """The backlog has reached its bound."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DuplicateRequest(InferqError):
    """A job of that id is alive: wait for its end, or give another id."""


class IdempotencyConflict(InferqError):
    """Another request was sent under this idempotency key; nothing was written."""


class NotDurable(InferqError):
    """The job is not known to be safe against the loss of the server.

    `request_id` is None if nothing was written; else the job was accepted, and will run unless the server is lost.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class UnknownModel(InferqError):
    """No model was named, and there is not exactly one that is served now."""


class UnknownRequest(InferqError):
    """Nothing is known under that id: it never was, or its result has expired."""


class JobLost(InferqError):
    """The stream is gone while it was read: its time to live passed, or Redis lost it."""


class RequestReplaced(InferqError):
    """Another job has begun under the same id while its stream was read."""


class RedisUnavailable(InferqError):
    """Redis is away, or refuses the command. Whether a command that met this was carried out may be unknown."""


class UnsuitableConnection(InferqError, ValueError):
    """The Redis client or URL cannot be used; the message says what to change."""


class InvalidSigningKey(InferqError, ValueError):
    """A signing key has no id, is too short, or cannot be read; the message says which, and repeats no secret."""


class Unsigned(InferqError):
    """A job has no signature, or one that is not its own or by no key that is known here; the message says which."""


class RequestFailed(InferqError):
    """The job ended in a `failed` event."""

    def __init__(self, request_id: str, code: ErrorCode, message: str, attempts: int) -> None:
        super().__init__(f"{code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message
        self.attempts = attempts


class RequestRefused(RequestFailed):
    """The worker refused the request; the same request will be refused again."""


class EngineFailure(RequestFailed):
    """The service failed the request; the same request may well succeed later."""


_REFUSED = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.BAD_PAYLOAD, ErrorCode.UNSIGNED})


def failure(request_id: str, event: Failed) -> RequestFailed:
    """The exception that a `failed` event stands for."""
    cls = RequestRefused if event.code in _REFUSED else EngineFailure
    return cls(request_id, event.code, event.message, event.attempts)
