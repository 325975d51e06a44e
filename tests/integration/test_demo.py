"""`make demo` does what it shows, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.processes import all_gone
from support.tree import ROOT

DEMO = [sys.executable, str(ROOT / "examples" / "demo.py")]


@contextmanager
def demo(folder: Path, *wrapper: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*wrapper, *DEMO],
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What it printed up to the line that matches."""
    assert process.stdout
    printed = ""
    for line in process.stdout:
        printed += line
        if re.search(pattern, line):
            return printed
    raise AssertionError(f"no line matches {pattern!r}:\n{printed}")


def started_by(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The demo and all that it has started: producer, worker, engine, server."""
    main = psutil.Process(process.pid)
    found = [main, *main.children(recursive=True)]
    assert len(found) >= 5, [each.cmdline() for each in found]
    return found


@pytest.mark.timeout(300)
async def test_four_chats_stream_and_one_is_cancelled(folder: Path) -> None:
    with demo(folder) as process:
        shown = read_until(process, r"^chat-\d \| ")
        processes = started_by(process)
        rest, _ = process.communicate(timeout=240)
        assert process.returncode == 0, shown + rest
        await all_gone(processes)
    printed = shown + rest
    for number in range(1, 5):
        assert re.search(rf"^chat-{number} \| \w", printed, re.MULTILINE), printed
    figures = dict(re.findall(r"^ +(chat-\d) .* (\d+ +\w+) *$", printed, re.MULTILINE))
    reasons = {chat: row.split()[1] for chat, row in figures.items()}
    assert reasons.pop("chat-3") == "cancelled"
    assert 32 <= int(figures["chat-3"].split()[0]) < 400
    assert len(reasons) == 3 and set(reasons.values()) <= {"stop", "length"}
    assert "Paris" in printed
    assert [name for name in os.listdir(folder) if name.startswith("inferq-")] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)],
    ids=lambda value: getattr(value, "name", None),
)
async def test_ended_part_way_it_leaves_no_process(folder: Path, number: signal.Signals, status: int) -> None:
    with demo(folder) as process:
        read_until(process, r"^chat-\d \| ")
        processes = started_by(process)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == status
        await all_gone(processes)
    if number != signal.SIGKILL:
        assert [line for line in rest.splitlines() if line.startswith("inferq: ")] == [
            "inferq: interrupted; worker, server and producer have ended"
        ]
        assert "Traceback" not in rest


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_it_ends_when_whoever_started_it_is_killed(folder: Path) -> None:
    """`kill -9` of make itself: the shell here stands in its place."""
    with demo(folder, "/bin/sh", "-c", '"$@"; exit', "sh") as shell:
        read_until(shell, r"^chat-\d \| ")
        processes = started_by(shell)
        shell.kill()
        await all_gone(processes)


@pytest.mark.timeout(300)
async def test_a_worker_that_cannot_start_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_ENGINE_COMMAND", "/bin/false")
    with demo(folder) as process:
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "inferq: the worker exited with 1; the end of the worker's log:" in printed
    assert "engine.unusable" in printed
    assert "Traceback" not in printed
