"""The module of `bench/scripted_engine.py`, for tests that compare texts: benchmarks are scripts, not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTED_ENGINE = Path(__file__).parents[2] / "bench" / "scripted_engine.py"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTED_ENGINE.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_load("engine_trace")  # which the other one imports from beside it
_module = _load("scripted_engine")

EOS_TOKEN_ID: int = _module.EOS_TOKEN_ID
VOCAB_SIZE: int = _module.VOCAB_SIZE
continuation = _module.continuation
text_folder = _module.text_folder
