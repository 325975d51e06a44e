"""The time and the memory that the GPU benchmark has, and what it does where they do not suffice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gpu_bench import Runner, loading
from support.tree import ROOT

sys.path.append(str(Path(__file__).parents[3] / "bench"))

import torch
from figures import OVER_BUDGET
from gpu_parts import budget as gpu_budget
from gpu_parts import engine as gpu_engine
from gpu_parts.memory import memory_shortage

from inferq.cuda.memory import MemoryShortageError
from inferq.engine.errors import ModelLoadError

BENCH = ROOT / "bench"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_may_use_what_is_left_but_not_what_is_kept_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    budget = gpu_budget.TimeBudget(100.0, {"first": 20.0, "second": 30.0, "third": 40.0}, clock=clock)
    budget.begin("first")
    assert budget.left == 30.0  # 10 of them were kept for nobody
    clock.now += 5
    assert budget.allows("a case", 25.0)
    assert capsys.readouterr().out == ""
    budget.begin("second")
    assert budget.left == 55.0
    clock.now += 50
    assert not budget.allows("a long case", 6.0)
    said = capsys.readouterr().out
    assert said.startswith("skipped: second: a long case: no time left")
    assert budget.allows("a short case", 5.0)
    budget.begin("third")
    assert budget.left == 45.0
    clock.now += 60
    assert not budget.allows("anything", 0.0)
    assert [line.split(":")[0] for line in budget.skipped] == ["second", "third"]


def test_the_guard_ends_a_run_that_hangs() -> None:
    program = """
import argparse, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from gpu_parts import run as gpu_run
from gpu_parts.plan import FULL
class Hangs:
    def copy_bandwidth(self): raise RuntimeError("no device")
class Run(gpu_run.Run):
    def measure(self):
        self._budget.begin("bandwidth")
        self.keys["copy_gb_s"] = 7
        time.sleep(60)
args = argparse.Namespace(json=True, check=False)
Run(Hangs(), FULL, seconds=100).guarded(args, hard_seconds=0.2)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(BENCH), str(ROOT / ".typecheck")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == OVER_BUDGET, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["wrong"] == ["bandwidth: out of time"]
    assert said["copy_gb_s"] == 7


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "Tried to allocate 2 GiB"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        (loading(MemoryShortageError("0 blocks")), "not enough"),
        (loading(torch.OutOfMemoryError("CUDA out of memory")), "not enough"),
        (RuntimeError("an illegal memory access"), None),
        (loading(RuntimeError("out of resources: shared memory")), None),
        (ModelLoadError("the gate refuses it"), None),
    ],
    ids=repr,
)
def test_a_lack_of_memory_is_told_from_a_fault(exc: Exception, said: str | None) -> None:
    found = memory_shortage(exc)
    assert found is None if said is None else found is not None and found.endswith(said)


def test_a_step_names_no_block_that_the_cache_does_not_have() -> None:
    runner: Any = Runner(num_blocks=1023)
    with pytest.raises(ValueError, match="1023 blocks do not hold 64 sequences of 1024 tokens"):
        gpu_engine.launch_decode(runner, rows=64, context=1024)
    assert runner.launched == []
    runner = Runner(num_blocks=1024)
    assert len(gpu_engine.launch_decode(runner, rows=64, context=1024)) == 64
    blocks = [block for item in runner.launched for block in item.sequence.block_table]
    assert sorted(blocks) == list(range(1024))
