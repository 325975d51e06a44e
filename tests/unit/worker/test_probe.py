"""The container's health check: a sign of life of this very host, no other's, and nothing that is out of date."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
import redis

from inferq.producer.contract import Keys
from inferq.worker import probe
from inferq.worker.settings import read_settings

KEYS = Keys("demo")


@pytest.fixture
def beat(redis_url: str) -> object:
    """Writes a worker's sign of life, or its name alone when it has lapsed."""

    def write(worker: str, host: str, *, lapsed: bool = False) -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.zadd(KEYS.workers, {worker: 1})
            if not lapsed:
                client.set(KEYS.worker(worker), json.dumps({"host": host}), px=60_000)

    return write


@pytest.mark.parametrize(
    ("workers", "alive"),
    [
        ([], False),
        ([("w1", "here", False)], True),
        ([("w1", "there", False)], False),
        ([("w1", "here", True)], False),
        ([("w1", "there", False), ("w2", "here", False)], True),
    ],
)
async def test_only_a_live_worker_of_this_host_counts(redis_url: str, beat, workers: list, alive: bool) -> None:
    for worker, host, lapsed in workers:
        beat(worker, host, lapsed=lapsed)
    assert await probe.is_alive(read_settings(["--redis-url", redis_url]), "here") is alive


def test_the_exit_code_tells_and_no_model_library_is_loaded(redis_url: str, beat) -> None:
    program = (
        "import sys; from inferq.worker import probe; status = probe.main(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(status)"
    )

    def run() -> int:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env={"INFERQ_REDIS_URL": redis_url}, timeout=60).returncode

    assert run() == 1
    beat("w1", socket.gethostname())
    assert run() == 0


def test_a_server_that_is_away_is_a_failure_with_a_reason(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("INFERQ_REDIS_URL", "unix:///nowhere.sock")
    assert probe.main() == 1
    assert "nowhere.sock" in capsys.readouterr().err
