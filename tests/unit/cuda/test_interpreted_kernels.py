"""The tests of tests/kernels pass in a process of their own, in which Triton interprets the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sampling import sample_seed
from support.tree import ROOT

KERNELS = ROOT / "tests" / "kernels"


def run_interpreted(place: Path, config: pytest.Config) -> subprocess.CompletedProcess[str]:
    """Runs the tests there in a child pytest: the same sample of the slow ones that this process takes."""
    arguments = [f"--sample-seed={sample_seed(config)}", "--tb=short", "-p", "no:cacheprovider"]
    arguments += ["--full"] if config.getoption("--full") else []
    one_in = config.getoption("--one-in")
    arguments += [] if one_in is None else [f"--one-in={one_in}"]
    if config.getoption("--full") and hasattr(config, "workerinput"):
        arguments += ["-n", str(config.workerinput["workercount"])]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(place)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(1800)
@pytest.mark.sized
def test_the_interpreted_kernels(request: pytest.FixtureRequest) -> None:
    child = run_interpreted(KERNELS, request.config)
    # Also where no test ran at all, which pytest answers with a code of its own.
    if child.returncode != 0:
        pytest.fail(f"pytest ended with {child.returncode}\n{child.stdout}", pytrace=False)


def test_a_file_without_tests_does_not_pass(request: pytest.FixtureRequest) -> None:
    assert run_interpreted(KERNELS / "conftest.py", request.config).returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_file_that_is_named_without_the_interpreter_says_how_to_run_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(KERNELS / "test_norm.py")]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TRITON_INTERPRET=1" in child.stderr and "tests/kernels/test_norm.py" in child.stderr
