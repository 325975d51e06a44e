"""The layers hold, and the checks that say so notice it when they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tree import LAYERS, ROOT, copy_tree

LAYER_CONTRACT = "Layers: the worker stands on producer and engine, the engine on cuda"
REDIS_CONTRACT = "Only worker and producer know Redis"
TRITON_CONTRACT = "Only cuda touches Triton and flash-attn"
MODEL_CONTRACT = "Nothing that runs in a web app or in the worker's own process loads a model library"
ENGINE_CONTRACT = "`import inferq.engine` is the parent side: no model library"

#: Each fault: the file it is planted in, the line, and the contract that must break.
FAULTS = [
    ("engine/planted.py", "from inferq.worker import settings", LAYER_CONTRACT),
    ("engine/planted.py", "from inferq.producer import contract", LAYER_CONTRACT),
    ("producer/planted.py", "from inferq.engine import request", LAYER_CONTRACT),
    ("producer/planted.py", "import inferq.cuda.planted", "producer and cuda are independent of each other"),
    ("cuda/planted.py", "from inferq.engine import request", LAYER_CONTRACT),
    ("producer/planted.py", "import torch", MODEL_CONTRACT),
    ("worker/planted.py", "def late() -> None:\n    from transformers import AutoTokenizer", MODEL_CONTRACT),
    ("worker/planted.py", "from inferq.engine import planted_child", MODEL_CONTRACT),
    ("engine/tracker.py", "import torch", ENGINE_CONTRACT),
    ("engine/scheduler.py", "import numpy", "The engine's policy is plain Python"),
    ("producer/planted.py", "import tokenizers", "A web app needs no tokenizer and no template engine"),
    ("engine/planted.py", "import redis.asyncio", REDIS_CONTRACT),
    ("cuda/planted.py", "import arq", REDIS_CONTRACT),
    ("engine/planted.py", "import triton", TRITON_CONTRACT),
    ("worker/planted.py", "import flash_attn", TRITON_CONTRACT),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copied = copy_tree(tmp_path / "inferq")
    (copied / "cuda" / "planted.py").write_text('"""A kernel\'s place."""\n')
    (copied / "engine" / "planted_child.py").write_text('"""A file of the child."""\n\nimport torch\n')
    return copied


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on a tree: its `.typecheck` folder goes before the editable install."""
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(tree / ".typecheck"), "COLUMNS": "200"}
    return subprocess.run(
        [str(program), "--no-cache", "--no-logo"], cwd=tree, env=environment, capture_output=True, text=True, timeout=60
    )


def check_names(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "check_names.py"), str(tree)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_tree_keeps_every_contract(tree: Path) -> None:
    verdict = lint(tree)
    assert verdict.returncode == 0, verdict.stdout
    assert " 0 broken" in verdict.stdout


@pytest.mark.parametrize(("place", "code", "contract"), FAULTS)
def test_a_planted_fault_breaks_its_contract(tree: Path, place: str, code: str, contract: str) -> None:
    with (tree / place).open("a") as file:
        file.write(f"\n{code}\n")
    verdict = lint(tree)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    broken = [line.removesuffix(" BROKEN") for line in verdict.stdout.splitlines() if line.endswith(" BROKEN")]
    assert contract in broken


def test_the_tree_has_no_bare_import_and_no_stray_key(tree: Path) -> None:
    verdict = check_names(tree)
    assert (verdict.returncode, verdict.stdout.strip()) == (0, "")


@pytest.mark.parametrize(
    ("place", "code", "message"),
    [
        ("worker/planted.py", "import engine.request", "worker/planted.py:2: imports `engine.request`"),
        ("engine/planted.py", "from producer import contract", "imports `producer`; say `inferq.producer`"),
        ("worker/planted.py", 'KEY = "inferq:demo:queue"', "worker/planted.py:2: spells a key"),
        ("producer/planted.py", 'KEY = f"arq:job:{0}"', "spells a key"),
        ("worker/planted.py", 'KEY = f"{0}:{1}:queue"', "puts a key together with ':queue'"),
        ("cuda/__init__.py", "", "cuda/__init__.py: must not exist"),
    ],
)
def test_a_planted_name_is_found(tree: Path, place: str, code: str, message: str) -> None:
    (tree / place).write_text(f"\n{code}\n")
    verdict = check_names(tree)
    assert verdict.returncode == 1
    assert message in verdict.stdout


def test_keys_may_be_documented_and_relative_imports_are_fine(tree: Path) -> None:
    (tree / "worker" / "planted.py").write_text('"""Reads `inferq:{model}:queue`."""\n\nfrom . import settings\n')
    assert check_names(tree).returncode == 0


def test_cuda_hides_nothing_of_nvidia(tmp_path: Path) -> None:
    """From the project's root, `cuda` is at most one more portion of NVIDIA's namespace, never a package of its own."""
    probe = "import importlib.util; spec = importlib.util.find_spec('cuda'); print(spec and spec.origin)"
    run = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "None"
    nvidia = tmp_path / "cuda" / "bindings"
    nvidia.mkdir(parents=True)
    (nvidia / "__init__.py").write_text("HERE = True\n")
    found = "import sys; sys.path.insert(0, ''); sys.path.append(sys.argv[1]); import cuda.bindings"
    run = subprocess.run([sys.executable, "-c", found, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", ["inferq.producer", "inferq.engine", "inferq.worker.main"])
def test_importing_a_torch_free_side_loads_no_model_library(module: str) -> None:
    probe = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert loaded & {"torch", "transformers", "accelerate", "safetensors", "gguf", "triton"} == set()
    if module == "inferq.producer":
        assert loaded & {"tokenizers", "jinja2", "numpy", "pydantic_settings", "inferq.engine"} == set()


def test_the_editable_install_and_the_tree_are_one() -> None:
    """Each layer is imported from its folder in this tree."""
    probe = "import inferq.producer, inferq.worker, inferq.engine, inferq.cuda as c; import sys; " + (
        "print(*(sys.modules[f'inferq.{n}'].__path__[0] for n in ('producer', 'worker', 'engine')), *c.__path__)"
    )
    run = subprocess.run([sys.executable, "-c", probe], cwd="/", capture_output=True, text=True, timeout=60)
    folders = [entry for entry in run.stdout.split() if os.path.isdir(entry)]
    assert folders == [str(ROOT / layer) for layer in LAYERS], run.stderr
