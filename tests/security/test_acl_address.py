"""ACL users and their passwords in a URL, on every way to the server; and what is said when the server refuses them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest
import redis.asyncio
from support.acl import PASSWORDS, Secured
from support.command_line import run
from support.processes import start_worker
from support.queue import MODEL, scripted_worker
from support.tls import encrypted

from inferq.producer import CancelOutcome, InferenceClient, RedisUnavailable, SyncInferenceClient, connect
from inferq.producer.connection import blocking_connection

SECRET = PASSWORDS["producer"]


def test_the_password_is_worth_the_test() -> None:
    """It has all that means something in a URL, and what looks as if it were encoded already."""
    assert set("@:/#%?&+['") <= set(SECRET) and "%2F" in SECRET and not SECRET.isascii()


async def use(client: InferenceClient) -> None:
    """Both connections of a client: the one for commands, and the one that waits."""
    async with client:
        request_id = await client.submit("x")
        reading = asyncio.create_task(client.result(request_id))
        assert await client.cancel(request_id) is CancelOutcome.CANCELLED
        assert (await reading).finish_reason == "cancelled"


async def test_by_a_unix_socket(secured: Secured) -> None:
    await use(InferenceClient.from_url(secured.url("producer"), model=MODEL))
    async with connect(secured.url("producer")) as arq:
        await use(InferenceClient(arq, model=MODEL))


async def test_by_tls(secured: Secured, tmp_path: Path) -> None:
    """The way on which such a password should go."""
    async with encrypted(Path(secured.socket), tmp_path) as port:
        credentials = f"producer:{quote(SECRET, safe='')}"
        url = f"rediss://{credentials}@localhost:{port}/{secured.database}?ssl_ca_certs={tmp_path}/cert.pem"
        await use(InferenceClient.from_url(url, model=MODEL))


async def test_credentials_as_options(secured: Secured) -> None:
    url = f"unix://{secured.socket}?db={secured.database}"
    async with connect(url, username="producer", password=SECRET) as arq:
        await use(InferenceClient(arq, model=MODEL))


async def test_threads_and_the_command_line(secured: Secured) -> None:
    def submit() -> str:
        with SyncInferenceClient(secured.url("producer"), model=MODEL) as client:
            return client.submit("x")

    request_id = await asyncio.to_thread(submit)
    assert await run("cancel", request_id, url=secured.url("producer")) == (0, "cancelled\n", "")
    code, out, _ = await run("status", request_id, "--redis-url", secured.url("reader"), url="unix:///nowhere")
    assert (code, "cancelled" in out) == (0, True)


async def test_a_name_with_signs_of_its_own(secured: Secured, admin: redis.asyncio.Redis) -> None:
    name = "team:web@1/ü%41"
    rules = {"commands": ["+@all"], "keys": ["*"], "channels": ["*"], "passwords": [f"+{SECRET}"]}
    await admin.acl_setuser(name, enabled=True, reset=True, **rules)
    try:
        own = f"unix://{quote(name, safe='')}:{quote(SECRET, safe='')}@{secured.socket}?db={secured.database}"
        async with connect(own) as client, blocking_connection(client) as blocking:
            for each in (client, blocking):
                assert (await each.execute_command("ACL", "WHOAMI")).decode() == name
    finally:
        await admin.acl_deluser(name)


@pytest.mark.parametrize(
    "credentials", ["", "producer@", ":wrong@", "producer:wrong@", "nobody:wrong@", "reader:wrong@"]
)
async def test_wrong_ones_are_said_and_not_shown(secured: Secured, credentials: str) -> None:
    url = f"unix://{credentials}{secured.socket}"
    async with InferenceClient.from_url(url, model=MODEL) as client:
        with pytest.raises(RedisUnavailable, match="credentials") as refused:
            await client.submit("x")
    assert "wrong" not in str(refused.value)
    code, out, err = await run("generate", "x", "--model", MODEL, url=url)
    assert (code, out, "credentials" in err, "wrong" in err.replace("wrong number", "")) == (3, "", True, False)
    with start_worker(url) as worker:
        assert await worker.wait() == 3
        assert "refuses the credentials" in worker.log
        assert "wrong" not in worker.log


async def test_none_at_all_are_refused_at_once(secured: Secured, tmp_path: Path) -> None:
    """Also by TCP, and where a database is chosen first: redis-py alone would try again without an end."""
    async with encrypted(Path(secured.socket), tmp_path) as port:
        for database in (0, 3):
            url = f"rediss://localhost:{port}/{database}?ssl_ca_certs={tmp_path}/cert.pem"
            async with InferenceClient.from_url(url, model=MODEL) as client, asyncio.timeout(30):
                with pytest.raises(RedisUnavailable, match="credentials"):
                    await client.submit("x")
                with pytest.raises(RedisUnavailable, match="credentials"):
                    await client.result("x")


async def test_a_worker_shows_its_password_to_nobody(secured: Secured) -> None:
    """Given by the environment, and not by a flag, which `ps` shows."""
    async with scripted_worker(secured.url("worker"), "--log-level", "debug") as worker:
        assert PASSWORDS["worker"] not in worker.log and quote(PASSWORDS["worker"], safe="") not in worker.log
        for child in worker.family()[1:]:
            assert "INFERQ_REDIS_URL" not in child.environ()
