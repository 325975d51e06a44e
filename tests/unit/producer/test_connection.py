"""What is asked of a Redis client, and what the clients that we make are like."""

from __future__ import annotations

import asyncio
import json
import pickle
from urllib.parse import quote

import pytest
from arq.connections import ArqRedis
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    DataError,
    NoPermissionError,
    OutOfMemoryError,
    TimeoutError,
)
from support.servers import valkey

from inferq.producer import InferenceClient, RedisUnavailable, UnsuitableConnection, connect, connection
from inferq.producer.connection import blocking_connection, redis_errors
from inferq.producer.contract import decode_json, encode_json


async def test_connect_makes_a_client_that_speaks_json(redis_url: str) -> None:
    async with connect(redis_url) as client:
        assert client.job_serializer is encode_json
        assert client.job_deserializer is decode_json
        assert await client.ping()
        options = client.connection_pool.connection_kwargs
        assert options["socket_timeout"] and options["health_check_interval"]


async def test_a_password_with_any_character_comes_through() -> None:
    password = "p@ss:w/rd#%é?"
    with valkey() as url:
        async with connect(url) as client:
            await client.acl_setuser("app", enabled=True, passwords=[f"+{password}"], categories=["+@all"], keys=["*"])
        path = url.removeprefix("unix://")
        async with connect(f"unix://app:{quote(password, safe='')}@{path}") as client:
            assert await client.acl_whoami() == "app"
        async with InferenceClient.from_url(f"unix://app:wrong@{path}", model="tiny") as inference:
            with pytest.raises(RedisUnavailable, match="credentials"):
                await inference.submit("x")
            with pytest.raises(RedisUnavailable, match="credentials"):
                await anext(inference.stream("a"))


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://h", "redis://h:port", "redis://h?db=x", "redis://:secret/1@h", "redis://h?foo=1"]
)
def test_a_url_that_cannot_be_used_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UnsuitableConnection, match="percent-encoded") as caught:
        connect(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_REDIS_URL", "redis://elsewhere:7000/3")
    options = connect().connection_pool.connection_kwargs
    assert (options["host"], options["port"], options["db"]) == ("elsewhere", 7000, 3)


def foreign(**options: object) -> ArqRedis:
    pool = ConnectionPool.from_url("redis://localhost", **options.pop("pool", {}))
    return ArqRedis(pool, **options)


JSON_PAIR = {"job_serializer": encode_json, "job_deserializer": decode_json}
UNSUITABLE = {
    "arq's default, pickle": {},
    "pickle by name": {"job_serializer": pickle.dumps, "job_deserializer": pickle.loads},
    "one half": {"job_serializer": encode_json},
    "text, not bytes": {"job_serializer": json.dumps, "job_deserializer": lambda data: data},
    "broken": {"job_serializer": lambda value: 1 / 0, "job_deserializer": decode_json},
    "decoded": {**JSON_PAIR, "pool": {"decode_responses": True}},
}


@pytest.mark.parametrize("options", UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_an_unsuitable_client_is_refused_at_start_up(options: dict[str, object]) -> None:
    with pytest.raises(UnsuitableConnection, match="decode_responses" if "pool" in options else "JSON"):
        InferenceClient(foreign(**options))


def test_decoded_responses_are_refused_in_a_url_too() -> None:
    with pytest.raises(UnsuitableConnection, match="decode_responses"):
        connect("redis://localhost?decode_responses=True")


def test_a_json_pair_of_the_apps_own_will_do() -> None:
    own = foreign(job_serializer=lambda value: json.dumps(value).encode(), job_deserializer=json.loads)
    InferenceClient(own)


async def test_an_existing_client_stays_open(redis_url: str) -> None:
    async with connect(redis_url) as existing:
        async with InferenceClient(existing, model="tiny") as inference:
            await inference.submit("x", request_id="a")
            assert (await anext(inference.stream("a"))).type == "queued"
        assert await existing.ping()
        assert existing.connection_pool._available_connections


async def test_a_blocking_command_may_take_longer_than_the_socket_timeout(redis_url: str) -> None:
    async with connect(redis_url, socket_timeout=0.2) as client:
        blocking = blocking_connection(client)
        try:
            assert await blocking.blpop("nothing", timeout=0.5) is None
            assert blocking.connection_pool is not client.connection_pool
        finally:
            await blocking.aclose()


names = st.sampled_from(["XADD", b"XADD", "CONFIG GET", b"SCRIPT LOAD"])
views = st.binary(max_size=9).map(memoryview)
arguments = st.one_of(st.text(), st.binary(), views, st.integers(), st.floats(), st.just("x" * 10_000))


@given(names, st.lists(arguments, max_size=20))
def test_a_command_is_packed_as_redis_py_packs_it(name: str | bytes, rest: list[object]) -> None:
    ours = connect("redis://localhost").connection_pool.make_connection()
    assert b"".join(ours.pack_command(name, *rest)) == b"".join(Connection().pack_command(name, *rest))


@pytest.mark.parametrize("value", [None, True, [], {}, object(), "\ud800"], ids=lambda value: type(value).__name__)
def test_what_cannot_be_packed_is_refused(value: object) -> None:
    ours = connect("redis://localhost").connection_pool.make_connection()
    for each in (ours, Connection()):
        with pytest.raises((DataError, UnicodeEncodeError)):
            each.pack_command("SET", "key", value)


URLS = ["redis://h", "rediss://h", "unix:///s.sock", "redis+sentinel://h/service", "rediss+sentinel://h/service"]


@pytest.mark.parametrize("url", URLS)
def test_connections_of_every_kind_pack_in_c(url: str) -> None:
    client = connect(url)
    kind = client.connection_pool.connection_class
    assert kind.pack_command is connection._PacksInC.pack_command
    assert blocking_connection(client).connection_pool.connection_class is kind


class Seen:
    """Packs as before, and keeps what it was given."""

    def __init__(self) -> None:
        self.commands: list[tuple[object, ...]] = []

    def pack(self, *args: object) -> list[bytes]:
        self.commands.append(args)
        return Connection().pack_command(*args)


async def test_redis_py_sends_what_our_connections_pack(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and pipelines, of our own client and of the one that reads for a client of the web app's."""
    seen = Seen()
    monkeypatch.setattr(connection, "_SERIALIZER", seen)
    async with connect(redis_url) as client:
        await client.echo("one")
        async with client.pipeline(transaction=True) as pipe:
            await pipe.echo("two").execute()
    async with Redis.from_url(redis_url) as of_the_app:
        reading = blocking_connection(ArqRedis(of_the_app.connection_pool, **JSON_PAIR))
        await reading.echo("three")
        await reading.aclose()
    sent = [command for command in seen.commands if command[0] == "ECHO"]
    assert sent == [("ECHO", "one"), ("ECHO", "two"), ("ECHO", "three")]


ERRORS = {
    "away": (ConnectionError("refused"), "cannot be reached"),
    "slow": (TimeoutError("slow"), "cannot be reached"),
    "loading": (BusyLoadingError("loading"), "cannot be reached"),
    "no route": (OSError(113, "No route to host"), "cannot be reached"),
    "full": (OutOfMemoryError("OOM"), "full"),
    "closed": (AuthenticationError("WRONGPASS"), "WRONGPASS"),
    "not allowed": (NoPermissionError("no permissions"), "refused a command: no permissions"),
}


@pytest.mark.parametrize(("error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_what_redis_py_raises_becomes_one_error(error: Exception, message: str) -> None:
    with pytest.raises(RedisUnavailable, match=message) as caught, redis_errors():
        raise error
    assert caught.value.__cause__ is error


async def test_a_server_that_is_not_there_is_told_soon() -> None:
    async with InferenceClient.from_url("unix:///nowhere/at/all.sock", model="tiny") as inference:
        async with asyncio.timeout(10):
            with pytest.raises(RedisUnavailable, match="cannot be reached"):
                await inference.submit("x")
            with pytest.raises(RedisUnavailable):
                await inference.status("a")
            with pytest.raises(RedisUnavailable):
                await inference.cancel("a")
