"""What `cuda/` may import, and that an engine on a CPU works where none of that is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import save_tiny_model
from support.tree import ROOT

FILES = sorted((ROOT / "cuda").rglob("*.py"))
ANYWHERE = {*sys.stdlib_module_names, "torch", "triton"}
#: Optional: whoever imports these files may do without.
IN_FUNCTIONS = {"flash_attn", "flash_attn_interface"}

#: Runs before anything else is imported. It hides packages from `import` and from `importlib.util.find_spec`.
HIDE = """
import importlib.machinery, sys

hidden = {"triton", "flash_attn", "flash_attn_interface"}
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in hidden else find(name, path, target)
)
"""


def imports(statements: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """The package of each absolute import, and whether it waits for a call."""
    for statement in statements:
        late = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], late) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module is not None
                yield node.module.partition(".")[0], late


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_stand_on_torch_and_triton_alone(file: Path) -> None:
    """And on each other, by relative imports: whoever copies the folder has all that it needs."""
    found = set(imports(ast.parse(file.read_text()).body))
    assert {package for package, late in found if not late} <= ANYWHERE
    assert {package for package, _ in found} <= ANYWHERE | IN_FUNCTIONS


def run_without_kernels(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a Python that has neither Triton nor flash-attn."""
    return subprocess.run([sys.executable, "-c", HIDE + code, *arguments], capture_output=True, text=True, timeout=100)


def test_the_packages_are_hidden() -> None:
    child = run_without_kernels("import importlib.util; print(importlib.util.find_spec('triton')); import triton")
    assert child.stdout == "None\n"
    assert "ModuleNotFoundError: No module named 'triton'" in child.stderr


#: Starts an engine's runner with each of the attention backends that there are.
START = """
from inferq.engine.assembly import load_runner
from inferq.engine.config import EngineConfig
from inferq.engine.errors import ModelLoadError

for attention in ("auto", "triton", "flash"):
    config = EngineConfig(model=sys.argv[1], device="cpu", attention=attention, num_blocks=4, threads=1)
    try:
        print("runs on", load_runner(config, lambda *event, **details: None).facts.attention)
    except ModelLoadError as error:
        print(error)
"""


def test_an_engine_on_a_cpu_needs_no_kernel(tmp_path: Path) -> None:
    """It loads a model, compares its answers, and has a cache for it; a backend that it cannot have, it refuses."""
    child = run_without_kernels(START, str(save_tiny_model(tmp_path)))
    assert child.returncode == 0, child.stderr
    auto, triton, flash = child.stdout.splitlines()
    assert auto == "runs on torch"
    for name, refusal in (("triton", triton), ("flash", flash)):
        assert refusal.startswith(f"attention {name!r} cannot be had: triton is not installed")
