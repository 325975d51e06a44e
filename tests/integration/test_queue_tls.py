"""Everything by TLS, with an ACL user and a password that a URL must encode, and certificates on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import redis.asyncio
from support.command_line import run
from support.processes import start_worker
from support.queue import MODEL, answer_to, scripted_worker
from support.servers import valkey
from support.tls import encrypted, speaks_tls, tls_server

from inferq.producer import InferenceClient, RedisUnavailable, SyncInferenceClient

USER, PASSWORD = "team:web@1", "p@ss:w/rd#%2F?é&+["
RULES = {"commands": ["+@all"], "keys": ["*"], "channels": ["*"], "passwords": [f"+{PASSWORD}"]}

KINDS = [
    pytest.param("redis", marks=pytest.mark.skipif(not speaks_tls(), reason="no redis-server with TLS")),
    "a proxy",
]


@pytest.fixture(params=KINDS)
async def url(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[str]:
    async with listening(request.param, folder) as (port, socket):
        async with redis.asyncio.Redis.from_url(f"unix://{socket}") as admin:
            await admin.acl_setuser(USER, enabled=True, reset=True, **RULES)
            await admin.acl_setuser("default", enabled=False)
        files = f"ssl_ca_certs={folder}/cert.pem&ssl_certfile={folder}/cert.pem&ssl_keyfile={folder}/key.pem"
        yield f"rediss://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@localhost:{port}/2?{files}"


@asynccontextmanager
async def listening(kind: str, folder: Path) -> AsyncIterator[tuple[int, str]]:
    """The port, and a socket in the clear."""
    if kind == "redis":
        with tls_server(folder) as port:
            yield port, f"{folder}/s.sock"
    else:
        with valkey() as plain:
            socket = plain.removeprefix("unix://")
            async with encrypted(Path(socket), folder, ask_client=True) as port:
                yield port, socket


def asked_by_a_thread(url: str) -> str:
    with SyncInferenceClient(url, model=MODEL) as client:
        request_id = client.submit("by a thread", sampling={"max_tokens": 20})
        return "".join(event.text for event in client.stream(request_id) if event.type == "delta")


async def test_everybody_comes_by_tls(url: str) -> None:
    async with scripted_worker(url), InferenceClient.from_url(url, model=MODEL) as producer:
        ids = [await producer.submit(f"no. {number}", sampling={"max_tokens": 200}) for number in range(8)]
        reading = asyncio.gather(*(producer.result(each, timeout=60) for each in ids))
        assert await asyncio.to_thread(asked_by_a_thread, url) == answer_to("by a thread", 20)
        generated = await run("generate", "by hand", "--model", MODEL, "--max-tokens", "20", url=url)
        assert generated == (0, answer_to("by hand", 20) + "\n", "")
        for number, result in enumerate(await reading):
            assert result.text == answer_to(f"no. {number}", 200)


@pytest.mark.slow
async def test_a_server_that_is_not_trusted_is_named_as_that(url: str, folder: Path) -> None:
    """By everybody, and without the password."""
    untrusted = url.replace(f"ssl_ca_certs={folder}/cert.pem&", "")
    async with InferenceClient.from_url(untrusted, model=MODEL) as producer:
        with pytest.raises(RedisUnavailable, match="certificate verify failed"):
            await producer.submit("x")
    code, _, err = await run("generate", "x", "--model", MODEL, url=untrusted)
    assert code == 3 and "certificate verify failed" in err
    with start_worker(untrusted) as worker:
        assert await worker.wait(30) == 3
        (line,) = worker.log.splitlines()
        assert "certificate verify failed" in line
    for told in (err, line):
        assert PASSWORD not in told and quote(PASSWORD, safe="") not in told
