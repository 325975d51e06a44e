"""What the users of the ACL file may not do, to inferq's own keys and to everything else on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError
from support.acl import Secured
from support.wire import Wire, following

from inferq.producer import InferenceClient, Keys, RedisUnavailable
from inferq.producer.commands import ProducerCommands
from inferq.worker.commands import Entry, WorkerCommands

KEYS = Keys("tiny")
USERS = ("producer", "worker", "reader")
#: By these somebody could read or wreck what is not inferq's, or keep the server from everybody.
DANGEROUS = [
    "FLUSHALL", "FLUSHDB", "CONFIG GET *", "CONFIG SET requirepass x", "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE",
    "SCRIPT FLUSH", "SCRIPT LOAD x", "SCRIPT KILL", "FUNCTION LIST", "FUNCTION FLUSH", "ACL LIST", "ACL WHOAMI",
    "ACL SETUSER x", "CLIENT LIST", "CLIENT KILL TYPE normal", "CLIENT PAUSE 1", "CLIENT NO-EVICT on", "MONITOR",
    "SHUTDOWN NOSAVE", "SAVE", "BGREWRITEAOF", "REPLICAOF NO ONE", "SYNC", "MODULE LIST",
    "MIGRATE h 1 k 0 1", "SWAPDB 0 1", "SLOWLOG GET", "LATENCY RESET", "CLUSTER INFO", "COMMAND", "SUBSCRIBE other",
    "PSUBSCRIBE *", "PUBLISH other x",
]  # fmt: skip
#: Of keys outside of the patterns.
FOREIGN = [
    "GET secret", "EXISTS secret", "HGET secret x", "XREAD STREAMS secret 0", "DEL secret", "SET secret 1",
    "EVAL return_redis.call('GET','secret') 0", "EVAL return_1 1 secret",
    "EVAL return_redis.call('FLUSHALL') 0", "EVAL return_redis.call('KEYS','*') 0",
    "RENAME inferq:tiny:dead secret",
]  # fmt: skip
#: Of inferq's own keys, by user.
OURS = {
    "producer": [
        "SET arq:in-progress:a x", "PEXPIRE arq:in-progress:a 1", "GET arq:job:a", "HSET inferq:worker:w x 1",
        "SET inferq:tiny:card {}", "DEL inferq:tiny:card", "ZADD inferq:workers 1 w", "ZREM inferq:workers w",
        "BLPOP inferq:tiny:bell 1", "SUBSCRIBE inferq:tiny:control", "RENAME inferq:a:dead_payload arq:job:a",
        "DEL inferq:tiny:queue", "DEL inferq:tiny:dead",
    ],
    "worker": [
        "SET arq:job:a {}", "SET inferq:a:cancel 1", "SET inferq:a:reader 1", "SET inferq:tiny:queue x",
        "PUBLISH inferq:tiny:control a", "GET inferq:a:dead_payload", "XREAD STREAMS inferq:a:events 0",
        "XADD inferq:a:wake * w 1",
    ],
    "reader": [
        "XADD inferq:a:events * t finished d {}", "XADD inferq:tiny:dead * id a", "DEL inferq:a:events",
        "PEXPIRE inferq:a:events 1", "PEXPIRE inferq:a:job 1", "SET inferq:a:cancel 1", "SET inferq:a:reader 1",
        "HSET inferq:a:job model x", "ZADD inferq:tiny:queue 1 a", "ZREM inferq:tiny:running a", "SET arq:job:a {}",
        "GET arq:job:a", "GET arq:in-progress:a", "DEL arq:job:a", "LPUSH inferq:tiny:bell 1",
        "PUBLISH inferq:tiny:control a", "GET inferq:a:dead_payload", "XREVRANGE inferq:tiny:dead + -",
        "GET inferq:a:cancel", "ZRANGE inferq:tiny:vtime 0 -1", "EVAL return_1 0", "EVALSHA 0 0", "INFO",
    ],
}  # fmt: skip

#: What Valkey, and Redis 7.0, say of a command that a script may not call.
REFUSED_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")


@pytest.fixture
async def wire(admin: redis.asyncio.Redis) -> Wire:
    return Wire(admin)


@pytest.fixture
async def users(secured: Secured) -> AsyncIterator[dict[str, Any]]:
    """A connection of each user."""
    connections = {user: redis.asyncio.Redis.from_url(secured.url(user)) for user in USERS}
    yield connections
    for connection in connections.values():
        await connection.aclose()


async def refused(connection: Any, command: str) -> bool:
    """Whether the server says that the user has no right to it, in whatever way it says so."""
    words = [word.replace("_", " ") if "redis.call" in word or "return" in word else word for word in command.split()]
    try:
        await connection.execute_command(*words)
    except NoPermissionError:
        return True
    except RedisError as exc:
        return any(sign in str(exc) for sign in REFUSED_IN_SCRIPT)
    return False


@pytest.mark.parametrize("user", USERS)
async def test_the_server_and_foreign_keys_are_out_of_reach(
    user: str, users: dict[str, Any], admin: redis.asyncio.Redis
) -> None:
    await admin.set("secret", "x")
    await admin.xadd(KEYS.dead, {"id": "a"})
    allowed = [command for command in DANGEROUS + FOREIGN if not await refused(users[user], command)]
    assert allowed == []
    assert await admin.get("secret") == b"x"


@pytest.mark.parametrize("user", USERS)
async def test_what_is_another_ones_work_is_refused(user: str, users: dict[str, Any], wire: Wire) -> None:
    await wire.claimed("a")
    await wire.redis.set(KEYS.dead_payload("a"), "x", px=60_000)
    before = await wire.everything()
    allowed = [command for command in OURS[user] if not await refused(users[user], command)]
    assert allowed == []
    assert await wire.everything() == before


async def test_nobody_without_a_password_does_anything(secured: Secured) -> None:
    for options in ({}, {"username": "producer"}, {"username": "reader", "password": "x"}, {"password": "x"}):
        async with redis.asyncio.Redis(unix_socket_path=secured.socket, **options) as nobody:
            with pytest.raises(RedisError):
                await nobody.ping()


class TestScripts:
    async def test_a_producer_claims_nothing(self, users: dict[str, Any], wire: Wire) -> None:
        await wire.claimed("a")
        await wire.lapse("a")
        await wire.enqueue("b")
        before = await wire.everything()
        wire.worker = WorkerCommands(users["producer"], KEYS)
        for takeover in (False, True):
            with pytest.raises(RedisError):
                await wire.claim(slots=3, takeover=takeover)
        assert await wire.everything() == before

    async def test_a_producer_takes_no_ones_job_away(self, users: dict[str, Any], wire: Wire) -> None:
        """Nor does it get the lease that a worker had."""
        job = await wire.claimed("a")
        before = await wire.everything()
        wire.worker = WorkerCommands(users["producer"], KEYS)
        with pytest.raises(RedisError):
            await wire.worker.renew([("a", job.token)], lease_ms=60_000)
        with pytest.raises(RedisError):
            await wire.reacquire(job)
        with pytest.raises(RedisError):
            await wire.worker.beat("w", "{}", "{}", ttl_ms=1000)
        assert await wire.everything() == before

    async def test_a_worker_enqueues_nothing(self, users: dict[str, Any], wire: Wire) -> None:
        before = await wire.everything()
        wire.producer = ProducerCommands(users["worker"], KEYS)
        with pytest.raises(RedisError):
            await wire.enqueue("a")
        assert await wire.everything() == before

    @pytest.mark.parametrize("lacking", ["xadd", "set", "zadd", "hget"])
    async def test_a_right_that_lacks_is_no_jobs_fault(self, secured: Secured, wire: Wire, lacking: str) -> None:
        """Whatever the user is called: Valkey's message has his name, and here that is a word of broken streams."""
        await wire.enqueue("a")
        rules = {"commands": ["+@all", f"-{lacking}"], "keys": ["*"], "channels": ["*"], "passwords": ["+x"]}
        await wire.redis.acl_setuser("stream", enabled=True, reset=True, **rules)
        options = {"username": "stream", "password": "x", "db": secured.database}
        try:
            async with redis.asyncio.Redis(unix_socket_path=secured.socket, **options) as limited:
                with pytest.raises(RedisError):
                    await Wire(limited).claim()
        finally:
            await wire.redis.acl_deluser("stream")
        assert await wire.types("a") in (["queued"], ["queued", "started"])
        assert {"job", "payload"} <= await wire.job_keys("a")

    async def test_a_reader_runs_no_script(self, users: dict[str, Any], wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.enqueue("b")
        before = await wire.everything()
        producer, worker = ProducerCommands(users["reader"], KEYS), WorkerCommands(users["reader"], KEYS)
        entry: Entry = following(job)
        calls = [
            producer.cancel("a"),
            producer.cancel("b"),
            producer.expire(),
            producer.touch_reader("a"),
            worker.publish([entry]),
            worker.finish(following(job, kind="finished")),
            worker.hand_back("a", token=job.token, expected_id=entry.expected_id),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [NoPermissionError] * len(calls)
        assert await wire.everything() == before

    async def test_a_client_says_that_it_may_not(self, secured: Secured, wire: Wire) -> None:
        await wire.enqueue("a")
        async with InferenceClient.from_url(secured.url("reader"), model="tiny") as reader:
            for call in (lambda: reader.submit("x"), lambda: reader.cancel("a"), reader.dead_letters):
                with pytest.raises(RedisUnavailable, match=r"Redis refused a command: .*permissions"):
                    await call()
            assert (await reader.status("a")).position == 0
