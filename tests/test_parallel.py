"""The suite side by side: as many processes as there is room for, what is shared in one of them, a server for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import parallel
from support.tree import ROOT

GIB = 1 << 30
SUITE = """
import os
import pytest

@pytest.mark.parametrize("number", range(8))
def test_many(number):
    print("ran in", os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("OMP_NUM_THREADS"))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs pytest on two files of eight tests each."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["support.parallel"]\n')
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    for name in ("one", "other"):
        (tmp_path / f"test_{name}.py").write_text(SUITE)

    def run_pytest(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = ("PYTEST_XDIST_AUTO_NUM_WORKERS", "INFERQ_TEST_REDIS_URL", "OMP_NUM_THREADS")
        inherited = {name: value for name, value in os.environ.items() if name not in own}
        command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=inherited | environment, capture_output=True, text=True, timeout=250
        )

    return run_pytest


@pytest.mark.parametrize(
    ("num_cores", "available", "number"),
    [(1, 16 * GIB, 1), (2, 16 * GIB, 3), (8, 64 * GIB, 12), (64, 512 * GIB, 16), (8, 6 * GIB, 2), (2, GIB, 1)],
)
def test_there_are_as_many_processes_as_there_is_room_for(num_cores: int, available: int, number: int) -> None:
    assert parallel.num_processes(num_cores, available) == number


def test_a_file_stays_together_some_files_do_and_some_tests_do_not() -> None:
    fault, exploration = "tests/faults/test_a.py::test_x[1]", "tests/model/test_exploration.py::test_y[a::b]"
    assert parallel.unit_of("tests/unit/test_a.py::TestA::test_x[a::b]") == "tests/unit/test_a.py"
    assert parallel.unit_of(fault) == parallel.unit_of("tests/faults/test_b.py::test_y") != exploration
    assert parallel.unit_of(exploration) == exploration


def test_what_is_named_is_there() -> None:
    for named in (*parallel.TOGETHER, *parallel.APART, *parallel.FIRST):
        assert (ROOT / named).exists(), named


def test_a_file_runs_in_one_process_and_without_threads_of_torch(run: Run) -> None:
    done = run("-n", "2", "-v")
    assert done.returncode == 0, done.stdout
    passed = [line.split() for line in done.stdout.splitlines() if "PASSED" in line and "::" in line and "%" in line]
    where = {(words[-1].partition("::")[0], words[0]) for words in passed}
    assert len(passed) == 16 and len(where) == 2 and len({process for _, process in where}) == 2
    assert done.stdout.count("ran in gw0 1") == done.stdout.count("ran in gw1 1") == 8


def test_without_the_option_there_is_one_process_and_nothing_is_set(run: Run) -> None:
    environment = {"PYTEST_XDIST_WORKER": ""}
    assert run(**environment).stdout.count("ran in  None") == 16


def test_a_server_that_was_given_is_for_one_process(run: Run) -> None:
    given = {"INFERQ_TEST_REDIS_URL": "redis://localhost:1"}
    refused = run("-n", "2", **given)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "INFERQ_TEST_REDIS_URL" in refused.stderr
    assert run("-n", "auto", **given).stdout.count("ran in gw0") == 16
