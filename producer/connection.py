"""Connections to Redis: what inferq asks of a pool, a pool that has it, and a second one for commands that block.

Knows redis-py and arq's client; knows nothing of jobs.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from arq.connections import ArqRedis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from .address import pool_like, pool_of
from .contract import decode_json, encode_json
from .errors import RedisUnavailable, UnsuitableConnection

DEFAULT_URL: Final = "redis://localhost:6379"
#: A command that has no answer after this long is given up, and its connection with it.
SOCKET_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 5.0
#: An idle connection older than this is asked for a PONG before it is used: a half-open one never answers.
HEALTH_CHECK_S: Final = 30
RETRIES: Final = 3

#: What says that the connection, not the command, went wrong. ReadOnlyError: the server was demoted by a failover.
LOST: Final = (ConnectionError, TimeoutError, ReadOnlyError, OSError)
_REFUSED: Final = (AuthenticationError, AuthorizationError)
_SERIALIZER: Final = HiredisRespSerializer()
_T = TypeVar("_T")


class _PacksInC:
    """Of a connection: it packs commands by hiredis, as redis-py's own synchronous connections do, and not in Python.

    A call that publishes for many requests has thousands of arguments.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = _SERIALIZER.pack(*args)
        return packed


def _pack_in_c(pool: ConnectionPool) -> ConnectionPool:
    """The pool, for whose connections, of whatever kind they are, that holds from now on."""
    kind = pool.connection_class
    if not issubclass(kind, _PacksInC):
        pool.connection_class = type(kind.__name__, (_PacksInC, kind), {})
    return pool


class _CredentialsRefused(RedisError):
    """The server knows no such user or password, or asks for one."""


class _Retry(Retry):
    """Tries nothing again that was refused for its credentials.

    redis-py counts such a refusal among connection errors, and asks a new connection for a PONG before it has settled
    it: refused, that one is opened anew, and so on without an end.
    """

    async def call_with_retry(self, do: Callable[[], Awaitable[_T]], fail: Callable[[RedisError], Any]) -> _T:
        async def checked() -> _T:
            try:
                return await do()
            except _REFUSED as exc:
                await fail(exc)
                raise _CredentialsRefused(str(exc)) from exc

        return await super().call_with_retry(checked, fail)


def default_url() -> str:
    return os.environ.get("INFERQ_REDIS_URL") or DEFAULT_URL


def connect(url: str | None = None, *, retries: int = RETRIES, **options: Any) -> ArqRedis:
    """A client for commands that answer at once; it connects when it is first used.

    `url` is redis://, unix:// or redis+sentinel://, the first and the last with TLS as rediss, percent-encoded where it
    must be (see `address.py`); None means $INFERQ_REDIS_URL, else the local server. Options of redis-py's connections
    may stand in its query or in `options`; the query wins. A command whose connection breaks is sent again up to
    `retries` times.

    Raises UnsuitableConnection for a URL that cannot be read, or one that asks for decoded responses.
    """
    defaults: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "retry": _Retry(EqualJitterBackoff(cap=1.0, base=0.05), retries),
        # A server that has become a replica refuses to write: a new connection may lead to its successor.
        "retry_on_error": [ConnectionError, TimeoutError, OSError, ReadOnlyError],
    }
    pool = _pack_in_c(pool_of(url or default_url(), {**defaults, **options}))
    client = ArqRedis(pool, job_serializer=encode_json, job_deserializer=decode_json)
    client.auto_close_connection_pool = True
    check_client(client)
    return client


def check_client(client: ArqRedis) -> None:
    """Raises UnsuitableConnection for a client whose answers or job payloads inferq cannot work with."""
    decoded = client.connection_pool.connection_kwargs.get("decode_responses", False)
    if decoded:
        raise UnsuitableConnection(
            "inferq reads bytes: create the Redis connection without decode_responses (it may not be shared with code "
            "that needs text)"
        )
    if not _speaks_json(client):
        raise UnsuitableConnection(
            "inferq's jobs are JSON, never pickle: create the ArqRedis with job_serializer=encode_json and "
            "job_deserializer=decode_json (from inferq.producer), or let inferq.producer.connect(url) create it"
        )


def _speaks_json(client: ArqRedis) -> bool:
    """Whether the pair of serializers, whoever wrote it, is JSON both ways."""
    if client.job_serializer is None or client.job_deserializer is None:
        return False  # arq's default is pickle
    sample: dict[str, Any] = {"t": None, "f": "generate", "a": [{"prompt": "é"}], "k": {}, "et": 1}
    try:
        return decode_json(client.job_serializer(sample)) == sample == client.job_deserializer(encode_json(sample))
    except Exception:  # whatever a foreign serializer raises, it is not JSON
        return False


def blocking_connection(client: ArqRedis) -> Redis:
    """A client of its own to the same server, for XREAD BLOCK, BLPOP and subscriptions.

    It has no read timeout, since a command may rightly wait longer than one; callers bound each call themselves with
    `asyncio.timeout`. It never sends a command twice. Close it with `aclose()`.
    """
    connect_timeout_s = client.connection_pool.connection_kwargs.get("socket_connect_timeout") or CONNECT_TIMEOUT_S
    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": connect_timeout_s,
        "health_check_interval": 0,
        "protocol": 2,
        "retry": None,
        "retry_on_error": [],
        "retry_on_timeout": False,
    }
    return Redis.from_pool(_pack_in_c(pool_like(client.connection_pool, options)))


def is_refusal(error: BaseException) -> bool:
    """Whether no new connection will help, though redis-py counts it among connection errors: the credentials."""
    refused = (*_REFUSED, _CredentialsRefused)
    return isinstance(error, refused) or isinstance(error.__cause__, refused)


def unavailable(error: Exception) -> RedisUnavailable:
    """What a producer is told of an error of redis-py."""
    match error:
        case OutOfMemoryError():
            return RedisUnavailable("Redis is full and refuses to write; nothing was written")
        case _ if is_refusal(error):
            return RedisUnavailable(f"Redis refused the credentials: {error}")
        case ConnectionError() | TimeoutError() | OSError():
            return RedisUnavailable(f"Redis cannot be reached: {error}")
        case _:
            return RedisUnavailable(f"Redis refused a command: {error}")


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turns whatever redis-py raises inside into RedisUnavailable."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise unavailable(exc) from exc
