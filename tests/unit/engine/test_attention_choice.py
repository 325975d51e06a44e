"""Which backend serves a model: the one asked for, or on a GPU the fastest of those that can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from inferq.cuda import availability
from inferq.engine.attention import AttentionBackend, AttentionParams, LayerProbe, LayerShape
from inferq.engine.attention import choice as choice_module
from inferq.engine.attention.backends import choose_backends
from inferq.engine.attention.choice import Workload, by_speed, measure_decode
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.errors import ModelLoadError

FULL = LayerProbe(LayerShape(2, 16, 16), 4, AttentionParams(0.25))
SLIDING = LayerProbe(LayerShape(2, 16, 16), 4, AttentionParams(0.25, window=8))
CPU = torch.device("cpu")
WORKLOAD = Workload([FULL, SLIDING, FULL], max_seqs=3, max_context=40, dtype=torch.float32, device=CPU)


class Named(ReferenceAttention):
    def __init__(self, name: str, block_size: int = 16) -> None:
        super().__init__(block_size)
        self.name = name  # type: ignore[misc]


def choose(seconds: dict[str, float | str]) -> Any:
    """Seconds for each candidate, or why it cannot."""

    def measure(backend: AttentionBackend, workload: Workload) -> float:
        value = seconds[backend.name]
        if isinstance(value, str):
            raise ModelLoadError(value)
        return value

    return by_speed({name: lambda name=name: Named(name) for name in seconds}, WORKLOAD, measure)


def test_the_fastest_is_chosen_and_the_log_says_by_how_much() -> None:
    ranked = choose({"flash": 3e-5, "triton": 2e-5, "torch": 5e-3})
    assert [each.backend.name for each in ranked] == ["triton", "flash", "torch"]
    chosen = ranked[0]
    assert chosen.reason == ("decode of 3 sequences of 40 tokens, all layers: flash 30 us, triton 20 us, torch 5000 us")


def test_one_that_cannot_is_passed_over_and_the_log_says_why() -> None:
    (chosen,) = choose({"flash": "flash-attn is not installed", "triton": 2e-5})
    assert chosen.backend.name == "triton"
    assert chosen.reason.endswith("triton 20 us; flash: flash-attn is not installed")


def test_one_that_fails_in_any_way_is_passed_over_and_the_log_says_how() -> None:
    def measure(backend: AttentionBackend, workload: Workload) -> float:
        if backend.name == "triton":
            raise RuntimeError("out of resource: shared memory, Required: 102400\nHardware limit: 101376")
        return 1.0

    (chosen,) = by_speed({name: lambda name=name: Named(name) for name in ("triton", "torch")}, WORKLOAD, measure)
    assert chosen.reason.endswith("; triton: RuntimeError: out of resource: shared memory, Required: 102400")


def test_one_that_cannot_be_made_is_passed_over_too() -> None:
    def fail() -> AttentionBackend:
        raise ModelLoadError("no such thing here")

    candidates = {"triton": fail, "torch": lambda: Named("torch")}
    assert by_speed(candidates, WORKLOAD, lambda *_: 1.0)[0].backend.name == "torch"


def test_where_none_can_each_says_why() -> None:
    with pytest.raises(
        ModelLoadError, match="no attention backend can serve this model: flash: float32; triton: no GPU"
    ):
        choose({"flash": "float32", "triton": "no GPU"})


def test_the_measure_is_a_decode_of_each_kind_of_layer_times_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int | None]] = []

    class Watched(ReferenceAttention):
        def attend(self, layer: int, query: Any, key: Any, value: Any, params: AttentionParams) -> torch.Tensor:
            seen.append((query.shape[0], self._groups[0].parts[0].length, params.window))
            return super().attend(layer, query, key, value, params)

        def allocate(self, layers: Sequence[LayerShape], num_blocks: int, **options: Any) -> None:
            assert (list(layers), num_blocks) == ([FULL.shape], 3 * 4)
            super().allocate(layers, num_blocks, **options)

        def prepare(self, batch: StepBatch) -> None:
            assert batch.block_tables.shape == (3, 4)  # as wide as the longest context makes them
            super().prepare(batch)

    long = replace(WORKLOAD, max_context=50)
    clock = iter(range(10_000))
    monkeypatch.setattr(choice_module.time, "perf_counter", lambda: float(next(clock)))
    # Each run, of ten layers, takes one tick of the clock: twice the one kind, once the other.
    assert measure_decode(None, Watched(16), long) == pytest.approx(0.3)
    assert set(seen) == {(3, 50, None), (3, 50, 8)}


@pytest.mark.parametrize("graph_safe", [False, True])
def test_a_graph_is_measured_where_it_will_be_one(graph_safe: bool) -> None:
    recorded: list[Callable[[], None]] = []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        recorded.append(run)
        return run

    backend = Named("torch")
    backend.graph_safe = graph_safe  # type: ignore[misc]
    assert measure_decode(capture, backend, WORKLOAD) > 0
    assert len(recorded) == (2 if graph_safe else 0)


def test_what_is_measured_is_no_larger_than_what_can_come() -> None:
    assert WORKLOAD.size == (3, 40)
    assert replace(WORKLOAD, max_seqs=500, max_context=10**6).size == (32, 1024)


def test_a_cpu_gets_the_plain_one() -> None:
    (chosen,) = choose_backends("auto", None, WORKLOAD)
    assert (chosen.backend.name, chosen.reason) == ("torch", "the device is a CPU")
    assert choose_backends("torch", None, WORKLOAD)[0].backend.name == "torch"


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_what_needs_a_gpu_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ModelLoadError, match=f"'{name}' cannot be had: the device is a CPU; use --attention auto or torch"
    ):
        choose_backends(name, None, WORKLOAD)


def test_what_needs_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    on_cuda = replace(WORKLOAD, device=torch.device("cuda"))
    with pytest.raises(ModelLoadError, match="triton is not installed; it comes with torch's CUDA builds"):
        choose_backends("triton", None, on_cuda)
    (chosen,) = choose_backends("auto", None, on_cuda)
    assert (chosen.backend.name, chosen.reason[:23]) == ("torch", "triton is not installed")


def test_a_card_that_is_too_old_says_so_and_gets_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(availability.torch.cuda, "get_device_name", lambda device: "Tesla T4")
    on_cuda = replace(WORKLOAD, device=torch.device("cuda"))
    with pytest.raises(
        ModelLoadError, match=r"Tesla T4 has compute capability 7.5, and 8.0 is needed; use --attention"
    ):
        choose_backends("triton", None, on_cuda)
    assert choose_backends("auto", None, on_cuda)[0].backend.name == "torch"


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(ModelLoadError, match=r"no attention backend 'xformers'; there are: auto, flash, triton, torch"):
        choose_backends("xformers", None, WORKLOAD)
