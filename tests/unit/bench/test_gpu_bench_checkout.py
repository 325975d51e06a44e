"""What the GPU benchmark needs of a machine: a bare checkout, and nothing but torch and what comes with it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.tree import ROOT

sys.path.append(str(Path(__file__).parents[3] / "bench"))

from figures import CANNOT_MEASURE

BENCH = ROOT / "bench"
#: What the benchmark may ask for, besides Python.
ALLOWED = ("torch", "triton", "transformers", "numpy")
#: What only some versions of these require, for their commands.
NOT_NEEDED = ("pydantic",)


def closure(names: tuple[str, ...]) -> set[importlib.metadata.Distribution]:
    """The distributions of that name and all that they require, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name in NOT_NEEDED:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what torch's CUDA builds have besides
        wanted = map(Requirement, found[name].requires or ())
        waiting += [each.name.lower() for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return set(found.values())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python for which nothing is installed but ALLOWED and what these require."""
    site = tmp_path_factory.mktemp("site")
    for distribution in closure(ALLOWED):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return {"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(site)}


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the site module: nothing but the environment's path and Python's own library can be imported."""
    return subprocess.run(
        [sys.executable, "-S", "-s", *arguments], env=environment, cwd="/", capture_output=True, text=True, timeout=100
    )


def test_without_a_device_it_says_so_and_prints_no_figure(bare: dict[str, str]) -> None:
    ended = python({**bare, "CUDA_VISIBLE_DEVICES": ""}, str(BENCH / "gpu.py"), "--json", "--check")
    assert ended.returncode == CANNOT_MEASURE, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr == "cannot measure: torch finds no CUDA device here\n"


@pytest.mark.parametrize(
    ("capability", "lacks", "said"),
    [((7, 5), "", "A card has compute capability 7.5, and 8.0 is needed"), ((8, 0), "transformers", "transformers")],
)
def test_what_it_cannot_do_without_is_named(capability: tuple[int, int], lacks: str, said: str) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
sys.argv = ["gpu.py"]
import gpu
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device: {capability}
torch.cuda.get_device_name = lambda device: "A card"
if {lacks!r}:
    sys.modules[{lacks!r}] = None
gpu.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == CANNOT_MEASURE, ended.stderr
    assert (ended.stdout, ended.stderr.count("\n")) == ("", 1)
    assert ended.stderr.startswith("cannot measure: ")
    assert said in ended.stderr


def test_it_needs_nothing_but_torch_triton_transformers_and_numpy(bare: dict[str, str]) -> None:
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(BENCH)!r})
assert importlib.util.find_spec("inferq") is None
for name in ("pydantic", "redis", "structlog", "arq", "accelerate", "pytest"):
    assert importlib.util.find_spec(name) is None, name
import gpu
gpu.see_checkout()
from gpu_parts import card, run
from gpu_parts.versions import versions
import inferq.engine.assembly as assembly
assert assembly.__file__.startswith({str(ROOT)!r}), assembly.__file__
assert {str(ROOT)!r} not in sys.path
print(versions())
"""
    ended = python(bare, "-c", program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("torch ")
