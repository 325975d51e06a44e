"""A bound process dies with the one that started it, and hears no Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from support.processes import all_gone

from inferq.engine.lifeline import _die_with, spawn_bound

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
#: Starts a sleeper, says its pid, and waits for its own death.
PARENT = f"""
from inferq.engine.lifeline import spawn_bound
print(spawn_bound({SLEEPER!r}).pid, flush=True)
import time; time.sleep(600)
"""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux' own")


@linux_only
def test_a_bound_process_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
        parent.wait()
        asyncio.run(all_gone([child]))


@linux_only
def test_a_parent_that_died_before_the_signal_was_asked_for_is_noticed() -> None:
    orphan = subprocess.Popen(SLEEPER, preexec_fn=_die_with(os.getpid() + 1))
    assert orphan.wait(timeout=20) == 1


def test_it_leads_a_session_of_its_own() -> None:
    process = spawn_bound(SLEEPER)
    try:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        process.kill()
        process.wait()


@linux_only
def test_a_process_started_in_another_thread_outlives_that_thread() -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(spawn_bound(SLEEPER)))
    thread.start()
    thread.join()
    process = started[0]
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_descriptors_and_environment_are_handed_over() -> None:
    reader, writer = os.pipe()
    code = f"import os; os.write({writer}, os.environ['WORD'].encode())"
    process = spawn_bound([sys.executable, "-c", code], pass_fds=(writer,), env={**os.environ, "WORD": "yes"})
    os.close(writer)
    with open(reader, "rb") as end:
        assert end.read() == b"yes"
    assert process.wait() == 0


def test_a_program_that_is_not_there_is_an_oserror() -> None:
    with pytest.raises(FileNotFoundError):
        spawn_bound(["/no/such/program"])
