"""The module of `bench/scripted_engine.py`, for tests that compare texts: benchmarks are scripts, not a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPTED_ENGINE = Path(__file__).parents[2] / "bench" / "scripted_engine.py"

_spec = importlib.util.spec_from_file_location("scripted_engine", SCRIPTED_ENGINE)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

EOS_TOKEN_ID: int = _module.EOS_TOKEN_ID
VOCAB_SIZE: int = _module.VOCAB_SIZE
continuation = _module.continuation
text_folder = _module.text_folder
