"""The engine that the GPU benchmark times: what has to have happened before its clock runs, and what must not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))

from gpu_parts import engine as gpu_engine
from gpu_parts import plan as gpu_plan
from gpu_parts import run as gpu_run
from gpu_parts.shapes import ModelShape

from inferq.cuda.graph import BrokenDeviceError
from inferq.engine.errors import ModelLoadError

SHAPE = ModelShape(layers=1, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10)


@pytest.mark.parametrize(("max_context", "tokens"), [(1000, 32), (10, 8)])
def test_requests_are_answered_before_any_is_timed(
    max_context: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[tuple[object, list[list[int]], int]] = []
    runner = object()
    stand_ins: dict[str, Any] = {
        "assemble": lambda *_, **__: runner,
        "loaded": lambda *_, **__: None,
        "load_kernels": lambda: None,
        "generate": lambda *asked: answered.append(asked),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu_engine, name, stand_in)
    capture: Any = SimpleNamespace(recorder=None)
    made = gpu_engine.make_runner(None, SHAPE, max_context=max_context, max_seqs=8, capture=capture)
    ((asked, prompts, new_tokens),) = answered
    assert made is asked is runner
    assert len(prompts) > 1 and {len(prompt) for prompt in prompts} == {tokens}
    assert new_tokens > 1 and tokens + new_tokens <= max_context  # prompts, and decodes


def broken(*_: Any, **__: Any) -> Any:
    try:
        raise BrokenDeviceError from RuntimeError("operation not permitted when stream is capturing")
    except BrokenDeviceError as exc:
        raise ModelLoadError("recording a CUDA graph failed") from exc


def test_a_device_that_is_broken_ends_the_choice_that_is_only_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be measured after it would be false; any other failure is printed."""
    chosen: list[str] = []

    def choose_backends(name: str, recorder: object, workload: object) -> list[str]:
        if name == "auto":
            raise RuntimeError("no compiler")
        chosen.append(name)
        return []

    nothing: Any = None
    monkeypatch.setattr(gpu_engine, "choose_backends", choose_backends)
    gpu_engine._choose("triton", nothing, nothing)
    assert chosen == ["triton"]
    monkeypatch.setattr(gpu_engine, "choose_backends", broken)
    with pytest.raises(ModelLoadError, match="recording a CUDA graph failed"):
        gpu_engine._choose("triton", nothing, nothing)


def test_nothing_is_measured_on_a_device_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    for part in ("kernels", "bandwidth", "prefill", "peer"):
        monkeypatch.setattr(gpu_run.Run, f"_{part}", lambda run, part=part: begun.append(part))
    monkeypatch.setattr(gpu_run.Run, "_engine", broken)
    card: Any = SimpleNamespace(free_bytes=lambda: 0)
    run = gpu_run.Run(card, gpu_plan.QUICK, seconds=100.0)
    run.measure()
    assert begun == ["kernels", "bandwidth", "prefill"]
    assert run.wrong == ["engine: failed"]
    assert run.skipped == ["engine: the rest: a recording failed, and the device cannot be used after it"]
