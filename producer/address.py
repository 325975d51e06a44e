"""From a URL to a pool of connections: one server, by TCP, TLS or a unix socket, or the primary that Sentinels name.

    redis://[user:password@]host[:port][/db]      rediss:// the same by TLS
    unix://[user:password@]/path[?db=n]
    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]      rediss+sentinel:// the same by TLS

Options stand in the query: those of redis-py, such as `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and
`ssl_check_hostname` (on unless it is said), and `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.exceptions import RedisError

from .errors import UnsuitableConnection

_SENTINEL_SUFFIX: Final = "+sentinel"
_SENTINEL_PORT: Final = 26379
_MESSAGE: Final = (
    "the Redis URL must be redis://[user:password@]host[:port][/db], unix:///path[?db=n] or "
    "redis+sentinel://host:port,host:port/service[/db], with rediss for TLS, special characters percent-encoded, and "
    "no option that redis-py does not know"
)


class _SentinelPool(SentinelConnectionPool):
    """Closes the connections to the Sentinels too."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.connection_pool.disconnect()


def pool_of(url: str, options: dict[str, Any]) -> ConnectionPool:
    """Raises UnsuitableConnection, which repeats nothing of the URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme.startswith("rediss"):
            options = {"ssl_check_hostname": not _is_unverified(parts, options), **options}
        if parts.scheme != "unix":
            options = {"socket_keepalive": True, **options}
        if parts.scheme.endswith(_SENTINEL_SUFFIX):
            pool: ConnectionPool = _sentinel_pool(parts, options)
        else:
            pool = ConnectionPool.from_url(url, **options)
        if parts.scheme == "unix" and not pool.connection_kwargs.get("path"):
            raise ValueError("no socket is named")  # redis-py connects to nothing then
        pool.make_connection()  # type: ignore[no-untyped-call]  # which only now looks at the options; it does not connect
    except (ValueError, TypeError, RedisError):  # its message may hold a part of the password
        raise UnsuitableConnection(_MESSAGE) from None
    return pool


def pool_like(pool: ConnectionPool, changes: dict[str, Any]) -> ConnectionPool:
    """Another pool for the same server, without a bound, and with some other options."""
    options = {**pool.connection_kwargs, **changes}
    if not isinstance(pool, SentinelConnectionPool):
        return ConnectionPool(pool.connection_class, **options)
    del options["connection_pool"]
    kind, manager = pool.connection_class, pool.sentinel_manager
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        pool.service_name, manager, connection_class=kind, is_master=pool.is_master, **options
    )


def _sentinel_pool(parts: SplitResult, options: dict[str, Any]) -> SentinelConnectionPool:
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    addresses = [_address(host) for host in hosts.split(",")]
    if not service:
        raise ValueError("no service is named")
    plain = f"redis://{credentials}@_/{database or 0}?{parts.query}"
    if not (database or "0").isdigit():
        raise ValueError("the database must be a number")
    options = {**options, **parse_url(plain)}
    del options["host"]
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    uses_tls = parts.scheme.startswith("rediss")
    shared = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl_"))}
    manager = Sentinel(  # type: ignore[no-untyped-call]
        addresses, sentinel_kwargs={**shared, **own, "ssl": uses_tls}
    )
    return _SentinelPool(  # type: ignore[no-untyped-call]
        unquote(service), manager, ssl=uses_tls, **options
    )


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("a Sentinel has no host")
    return parts.hostname, parts.port or _SENTINEL_PORT


def _is_unverified(parts: SplitResult, options: dict[str, Any]) -> bool:
    """Without a certificate that is checked there is no name to check."""
    given: dict[str, Any] = {**options, **parse_url(f"redis://_?{parts.query}")}
    return given.get("ssl_cert_reqs") == "none"
