"""What a start does when a graph cannot be recorded: it goes on where the device can be used, and ends where not.

The recorder is the real one, over a torch.cuda that there is none of here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.generation import Lines, greedy, make_runner, run
from support.models import save_tiny_model
from support.torch_ops import TORCH_OPS

from inferq.cuda.graph import GraphRecorder
from inferq.cuda.memory import free_bytes, peak_bytes
from inferq.engine import assembly, recording
from inferq.engine.attention import AttentionParams, LayerProbe, LayerShape
from inferq.engine.attention.choice import Choice, Workload, by_speed, measure_decode
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.config import EngineConfig
from inferq.engine.errors import ModelLoadError
from inferq.engine.kernels import Kernels
from inferq.engine.model import load_model
from inferq.engine.runner import ModelRunner, sample_on_host

GPU = torch.device("cuda")
KINDS = [LayerProbe(LayerShape(2, 16, 16), 4, AttentionParams(0.25, window=window)) for window in (None, 8)]
WORKLOAD = Workload(KINDS, max_seqs=3, max_context=40, dtype=torch.float32, device=torch.device("cpu"))
#: Between the two halves is torch's version.
BROKEN = "recording a CUDA graph with attention {name!r} failed, after which torch "
ADVICE = " cannot use the device in this process: start with --enforce-eager{otherwise}: RuntimeError: CUDA error: "


class Recordable(ReferenceAttention):
    """Launches a step, after which it waits if it `waits`. Rows of padding get zeros: no graph is replayed here."""

    graph_safe = True

    def __init__(self, cuda: FakeCuda, name: str = "triton", *, waits: bool = False) -> None:
        super().__init__(16)
        self.name = name
        self._cuda = cuda
        self._waits = waits

    def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
        self._cuda.launch(self.name)
        if self._waits:
            self._cuda.wait()
        if bool((self._slots < 0).any()):
            return query.new_zeros(*query.shape[:2], value.shape[-1])
        return super().attend(layer, query, key, value, params)


def choose(cuda: FakeCuda, *, waiting: str) -> list[Choice]:
    """Of two backends by their speed, of which the one called `waiting` cannot be recorded."""
    candidates: dict[str, Callable[[], Any]] = {
        name: partial(Recordable, cuda, name, waits=name == waiting) for name in ("flash", "triton")
    }
    return by_speed(candidates, WORKLOAD, partial(measure_decode, GraphRecorder(GPU)))


@pytest.mark.parametrize(("waiting", "otherwise"), [("flash", " or --attention triton"), ("triton", "")])
def test_a_measurement_that_breaks_the_device_ends_the_start_in_one_line(
    waiting: str, otherwise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        choose(FakeCuda(breaks=True).install(monkeypatch), waiting=waiting)
    message = str(caught.value)
    assert message.startswith(BROKEN.format(name=waiting)) and ADVICE.format(otherwise=otherwise) in message
    assert "\n" not in message


def test_a_measurement_that_breaks_nothing_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    (chosen,) = choose(FakeCuda().install(monkeypatch), waiting="flash")
    assert chosen.backend.name == "triton" and "flash: RuntimeError: CUDA error" in chosen.reason


def test_all_kinds_of_layers_of_all_backends_are_recorded_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the graphs of each are gone when the next one is recorded."""
    cuda = FakeCuda().install(monkeypatch)
    assert len(choose(cuda, waiting="")) == 2
    assert cuda.log.count("recorded") == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", std=0.3)


def assembled(folder: Path, lines: Lines, backend: ReferenceAttention) -> ModelRunner:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", num_blocks=32, max_num_seqs=4)
    return assembly.assemble(
        load_model(config, lines),
        config,
        lines,
        choose=lambda _: [Choice(backend, "the test's")],
        kernels=Kernels(TORCH_OPS, sample_on_host_as_a_kernel),
        capture=GraphRecorder(GPU),
    )


def sample_on_host_as_a_kernel(logits: torch.Tensor, batch: Any) -> None:
    sample_on_host(logits, batch)


def test_decode_graphs_that_break_the_device_end_the_start_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(breaks=True).install(monkeypatch)
    with pytest.raises(ModelLoadError) as caught:
        assembled(folder, Lines(), Recordable(cuda, "flash", waits=True))
    message = str(caught.value)
    assert message.startswith(BROKEN.format(name="flash")) and " or --attention triton: " in message
    assert "\n" not in message


def test_decode_graphs_that_break_nothing_are_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    lines = Lines()
    runner = assembled(folder, lines, Recordable(cuda, "flash", waits=True))
    assert lines.details("decode steps run without graphs")["reason"].startswith("RuntimeError: CUDA error: operation")
    prompts = [[5, 6, 7], list(range(3, 40))]
    assert run(runner, prompts, [greedy(6)] * 2).outputs == run(make_runner(folder), prompts, [greedy(6)] * 2).outputs


def test_what_is_measured_and_what_serves_are_recorded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    seen: dict[str, Any] = {}
    loaded: Any = SimpleNamespace(device=GPU)
    for name, stand_in in {
        "load_model": lambda config, log: loaded,
        "why_no_triton": lambda device: "none here",
        "assemble": lambda *_, **parts: seen.update(parts),
        "choose_backends": lambda name, capture, workload: seen.update(measuring=capture),
    }.items():
        monkeypatch.setattr(assembly, name, stand_in)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assembly.load_runner(EngineConfig(model="m"), Lines())
    seen["choose"](None)
    assert isinstance(seen["capture"], GraphRecorder) and isinstance(seen["measuring"], GraphRecorder)
    assert seen["capture"] is not seen["measuring"]


INVALIDATED = RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore of it")


@pytest.mark.parametrize(
    ("error", "needed", "free", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 0, 0, "CUDA out of memory. Tried"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), 0, 0, "CUBLAS_STATUS_ALLOC_FAILED when calling"),
        (INVALIDATED, 3 * 2**30, 2**20, "a decode step takes 3072 MiB, and 1 MiB are free"),
    ],
    ids=["the allocator", "a library", "in other words"],
)
@pytest.mark.parametrize("breaks", [False, True])
def test_graphs_that_do_not_fit_say_what_to_lower(
    error: Exception, needed: int, free: int, says: str, breaks: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(breaks=breaks).install(monkeypatch)
    monkeypatch.setattr(recording, "peak_bytes", lambda run, device: needed)
    monkeypatch.setattr(recording, "free_bytes", lambda device: free)
    monkeypatch.setattr(cuda, "refusal", error)
    with pytest.raises(ModelLoadError) as caught:
        assembled(folder, Lines(), Recordable(cuda, waits=True))
    advice = "not enough memory for CUDA graphs: lower max_num_seqs or gpu_memory_utilization, or set enforce_eager: "
    assert str(caught.value).startswith(advice + says) and "\n" not in str(caught.value)


def test_what_fails_beside_enough_memory_is_no_lack_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(recording, "peak_bytes", lambda run, device: 2**20)
    monkeypatch.setattr(recording, "free_bytes", lambda device: 2**20)
    lines = Lines()
    assembled(folder, lines, Recordable(cuda, waits=True))
    assert "not permitted" in lines.details("decode steps run without graphs")["reason"]


def test_what_a_step_takes_is_measured_beside_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = SimpleNamespace(now=100, peak=900)
    for name, stand_in in {
        "memory_allocated": lambda device: counted.now,
        "max_memory_allocated": lambda device: counted.peak,
        "reset_peak_memory_stats": lambda device: setattr(counted, "peak", counted.now),
        "mem_get_info": lambda device: (7, 10),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert peak_bytes(lambda: setattr(counted, "peak", 140), GPU) == 40
    assert free_bytes(GPU) == 7
