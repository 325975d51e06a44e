"""A small run takes a repeatable sample of the slow tests and nothing else away; a full run takes them all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.sampling import left_out
from support.tree import ROOT

SUITE = """
import pytest
from hypothesis import given, settings, strategies

@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_family(number): pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_small_family(number): pass

@pytest.mark.slow
def test_alone(): pass

@pytest.mark.slow(family="joined", share=0.1)
@pytest.mark.parametrize("number", range(15))
def test_joined_many(number): pass

@pytest.mark.slow(family="joined", share=0.1)
@pytest.mark.parametrize("number", range(5))
def test_joined_few(number): pass

@pytest.mark.slow(family="never in a small run", share=0)
def test_long(): pass

def test_quick(): pass

@given(strategies.integers())
def test_examples(number): assert settings().max_examples == EXAMPLES
"""
MIDNIGHT = """
import datetime, os

class Date(datetime.date):
    @classmethod
    def today(cls):
        return cls(2027, 2, 1) if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else cls(2027, 1, 31)

datetime.date = Date
"""
#: Not in the other runs, since whether there is a GPU is asked of torch, which takes seconds to import.
GPU_SUITE = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): pass

def test_quick(): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["support.sampling"]\n')
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers =\n    slow: many\n    gpu: a device\n"
    )
    return tmp_path


def run(suite: Path, *arguments: str, examples: int = 30) -> tuple[str, set[str]]:
    """The printed output and the names of the tests that passed."""
    (suite / "test_suite.py").write_text(SUITE.replace("EXAMPLES", str(examples)))
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", *arguments]
    # This test may itself run in a process of xdist's, whose name its children would take for their own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    printed = subprocess.run(command, cwd=suite, env=env, capture_output=True, text=True, timeout=250)
    assert printed.returncode == 0, printed.stdout
    # The processes of xdist put who and how far before the outcome, and the test behind it.
    lines = [re.search(r"PASSED .*::(\S+)|::(\S+) PASSED", line) for line in printed.stdout.splitlines()]
    return printed.stdout, {line[1] or line[2] for line in lines if line}


def test_a_sample_has_a_share_of_each_family(suite: Path) -> None:
    printed, passed = run(suite, "--sample-seed=1")
    assert "--sample-seed=1" in printed
    of_the_folder = ("test_family", "test_small_family", "test_alone")
    assert len({name for name in passed if name.startswith(of_the_folder)}) == 5  # a fifth of 23
    assert len({name for name in passed if name.startswith("test_joined")}) == 2
    assert {"test_quick", "test_examples"} <= passed
    assert "test_long" not in passed


def test_a_seed_repeats_its_sample_and_seeds_differ(suite: Path) -> None:
    samples = [run(suite, f"--sample-seed={seed}")[1] for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_several_processes_take_one_sample_and_say_so_once(suite: Path) -> None:
    printed, passed = run(suite, "-n", "2", "--sample-seed=3")
    assert passed == run(suite, "--sample-seed=3")[1]
    assert printed.splitlines().count("slow suites: a sample, --sample-seed=3 (all of them: --full)") == 2
    assert "[gw0]" in printed and "[gw1]" in printed


def test_the_day_ends_while_the_processes_start(suite: Path) -> None:
    """They take the sample of the day on which the run began."""
    with (suite / "conftest.py").open("a") as conftest:
        conftest.write(MIDNIGHT)
    printed, passed = run(suite, "-n", "2")
    assert "--sample-seed=20270131" in printed
    assert passed == run(suite, "--sample-seed=20270131")[1]


def test_a_full_run_leaves_nothing_out(suite: Path) -> None:
    _, passed = run(suite, "--full", examples=400)
    assert len(passed) == 20 + 2 + 20 + 4


def test_five_days_running_see_every_slow_test(request: pytest.FixtureRequest) -> None:
    """From one month to the next too; each day has its own."""
    items = request.session.items
    slow = {item for item in items if item.get_closest_marker("slow")}
    dates = (20270130, 20270131, 20270201, 20270202, 20270203)
    days = [slow - left_out(items, date, one_in=5) for date in dates]
    assert set.union(*days) == slow
    assert sum(map(len, days)) == len(slow)


def test_a_part_of_a_full_run_is_at_full_size(suite: Path) -> None:
    days = [run(suite, "--full", "--one-in=2", f"--sample-seed={day}", examples=400)[1] for day in (20270130, 20270131)]
    assert len(set.union(*days)) == 20 + 2 + 20 + 4
    assert set.intersection(*days) == {"test_quick", "test_examples"}


def test_a_test_that_is_named_runs(suite: Path) -> None:
    _, passed = run(suite, "test_suite.py::test_family[7]", "test_suite.py::test_family[8]")
    assert passed == {"test_family[7]", "test_family[8]"}


def test_gpu_tests_are_skipped_with_the_reason(suite: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    (suite / "test_gpu_suite.py").write_text(GPU_SUITE)
    printed, passed = run(suite, "test_gpu_suite.py")
    assert "no CUDA device" in printed
    assert passed == {"test_quick"}
