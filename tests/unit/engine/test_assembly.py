"""How a runner is put together: what is measured, in which order, and what is said where memory or kernels fail.

Where the order or a message matters and no GPU is needed to see it, a device's memory is played by numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generation import Lines, greedy, make_runner, run
from support.models import save_tiny_model
from support.torch_ops import TORCH_OPS

from inferq.engine import assembly
from inferq.engine import pool as pool_module
from inferq.engine.assembly import assemble
from inferq.engine.attention import LayerShape
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.config import EngineConfig
from inferq.engine.conformance import Gate
from inferq.engine.errors import ModelLoadError
from inferq.engine.kernels import Kernels
from inferq.engine.model import load_model
from inferq.engine.pool import pool_blocks
from inferq.engine.runner import ModelRunner, sample_on_host

LAYERS = [LayerShape(2, 16, 16)] * 2
#: Keys and values of two layers in bfloat16, for one block of 64 tokens.
BLOCK_BYTES = 2 * 2 * (16 + 16) * 2 * 64
GPU = torch.device("cuda")


def sample_by_kernel(logits: torch.Tensor, batch: StepBatch) -> None:
    sample_on_host(logits, batch)


KERNELS = Kernels(TORCH_OPS, sample_by_kernel)
PROMPTS = [[5, 6, 7], list(range(3, 40))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", std=0.3)


def assembled(folder: Path, lines: Lines, **parts: Any) -> ModelRunner:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", num_blocks=32)
    choice = Choice(ReferenceAttention(16), "the test's")
    options = {"choose": lambda _: [choice], "kernels": KERNELS, "capture": None} | parts
    return assemble(load_model(config, lines), config, lines, **options)


def test_with_kernels_the_model_is_fused_and_says_the_same(folder: Path) -> None:
    lines = Lines()
    outputs = run(assembled(folder, lines), PROMPTS, [greedy(6)] * 2).outputs
    assert outputs == run(make_runner(folder), PROMPTS, [greedy(6)] * 2).outputs
    fused = lines.details("modules fused")
    assert fused["norms"] == 5 and fused["mlps"] == 2
    chosen = {"backend": "torch", "kernels": f"torch {torch.__version__}", "reason": "the test's"}
    assert lines.details("attention chosen") == chosen


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_kernels_that_fail_or_are_wrong_are_left_out_and_the_model_serves(folder: Path, fault: str) -> None:
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        return TORCH_OPS.rms_norm(x, weight, eps, offset=offset) * 1.01

    lines = Lines()
    runner = assembled(folder, lines, kernels=replace(KERNELS, ops=replace(TORCH_OPS, rms_norm=rms_norm)))
    outputs = run(runner, PROMPTS, [greedy(6)] * 2).outputs
    assert outputs == run(make_runner(folder), PROMPTS, [greedy(6)] * 2).outputs
    reason = lines.details("modules are not fused")["reason"]
    assert ("no kernel image" in reason) if fault == "raises" else ("logits are off by" in reason)


class Wrong(ReferenceAttention):
    """Answers a little too much."""

    name = "wrong"

    def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
        return super().attend(layer, query, key, value, params) * 1.01


@pytest.mark.parametrize("kernels", [None, KERNELS], ids=["plain", "fused"])
def test_the_next_backend_serves_where_the_gate_refuses_the_first(folder: Path, kernels: Kernels | None) -> None:
    lines = Lines()
    choices = [Choice(Wrong(16), "fastest"), Choice(ReferenceAttention(16), "slower")]
    runner = assembled(folder, lines, choose=lambda _: choices, kernels=kernels)
    assert runner.facts.attention == "torch"
    passed_over = lines.details("attention passed over")
    assert passed_over["backend"] == "wrong" and "logits are off by" in passed_over["reason"]
    assert lines.details("attention chosen")["reason"] == "slower"
    assert run(runner, PROMPTS, [greedy(6)] * 2).outputs == run(make_runner(folder), PROMPTS, [greedy(6)] * 2).outputs


def test_where_the_gate_refuses_all_of_them_the_last_one_says_why(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="logits are off by"):
        assembled(folder, Lines(), choose=lambda _: [Choice(Wrong(16), "a"), Choice(Wrong(16), "b")], kernels=None)


class Failing(ReferenceAttention):
    def __init__(self, error: Exception) -> None:
        super().__init__(16)
        self._error = error

    def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
        raise self._error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            "not enough memory to compute 27 tokens",
        ),
        (
            RuntimeError("Failed to find C compiler."),
            r"fails on a flat batch with attention 'torch' \(RuntimeError: Failed",
        ),
    ],
    ids=["memory", "compiler"],
)
def test_what_fails_in_the_gate_is_told_as_what_it_is(folder: Path, error: Exception, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        assembled(folder, Lines(), choose=lambda _: [Choice(Failing(error), "")], kernels=None)


def test_no_graph_is_recorded_for_a_backend_that_reads_lengths_on_the_host(folder: Path) -> None:
    def capture(_: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("the torch backend takes its lengths from the host")

    lines = Lines()
    assembled(folder, lines, capture=capture)
    assert lines.details("decode steps run without graphs")["attention"].startswith("torch ")


@dataclass
class Memory:
    """A device of `total` bytes, on which the model took `used`, and whose steps take what `steps` say."""

    total: int
    used: int
    steps: dict[str, int] = field(default_factory=dict)
    peak: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = pool_module.torch.cuda
        for name, value in {
            "mem_get_info": lambda device: (self.total - self.used, self.total),
            "memory_allocated": lambda device: self.used,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.used),
            "max_memory_allocated": lambda device: self.peak,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(cuda, name, value)

    def step(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.peak = self.used + self.steps[name]

        return run


def blocks(memory: Memory, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], None], **fields: Any) -> int:
    memory.install(monkeypatch)
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=1000, **fields)
    return pool_blocks(
        LAYERS,
        config,
        block_size=64,
        context=4096,
        dtype=torch.bfloat16,
        device=GPU,
        largest_steps=steps or [memory.step("prompts")],
    )


def test_the_cache_gets_what_the_share_leaves_beside_the_model_and_the_largest_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(1000 * BLOCK_BYTES, 100 * BLOCK_BYTES, {"prompts": 40 * BLOCK_BYTES, "decodes": 10 * BLOCK_BYTES})
    assert blocks(memory, monkeypatch) == 500 - 100 - 40
    both = [memory.step("prompts"), memory.step("decodes")]
    assert blocks(memory, monkeypatch, *both) == 500 - 100 - 40 - 10


def test_too_little_left_says_what_to_raise_and_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(1000 * BLOCK_BYTES, 460 * BLOCK_BYTES, {"prompts": 38 * BLOCK_BYTES})
    with pytest.raises(
        ModelLoadError, match=r"hold 2 blocks .* at least 4 are needed: raise gpu_memory_utilization"
    ) as e:
        blocks(memory, monkeypatch)
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        assert name in str(e.value)


def test_a_step_that_does_not_fit_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with pytest.raises(
        ModelLoadError,
        match="a step: lower max_num_batched_tokens 777, max_num_seqs 1000 or max_model_len: CUDA out of",
    ):
        blocks(Memory(10**9, 10**6), monkeypatch, explode, max_num_batched_tokens=777)


def test_what_is_no_lack_of_memory_is_not_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        blocks(Memory(10**9, 10**6), monkeypatch, explode)


class GraphSafe(ReferenceAttention):
    """Not really: rows of padding are not for it, and no test here replays a graph."""

    graph_safe = True

    def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
        if bool((self._slots < 0).any()):
            return query.new_zeros(*query.shape[:2], value.shape[-1])
        return super().attend(layer, query, key, value, params)


def test_what_cannot_be_recorded_runs_without_graphs(folder: Path) -> None:
    def capture(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")

    lines = Lines()
    runner = assembled(folder, lines, choose=lambda _: [Choice(GraphSafe(16), "")], capture=capture)
    reason = lines.details("decode steps run without graphs")["reason"]
    assert reason == "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert run(runner, PROMPTS, [greedy(6)] * 2).outputs == run(make_runner(folder), PROMPTS, [greedy(6)] * 2).outputs


@pytest.mark.parametrize(("seqs", "tokens", "largest"), [(16, 6, 6), (3, 64, 3)])
def test_no_graph_is_larger_than_a_step_can_be(folder: Path, seqs: int, tokens: int, largest: int) -> None:
    lines = Lines()
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_blocks=32,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
    )
    choice = Choice(GraphSafe(16), "")
    assemble(
        load_model(config, lines), config, lines, choose=lambda _: [choice], kernels=KERNELS, capture=lambda run: run
    )
    assert lines.details("decode graphs recorded")["largest"] == largest


def test_a_sampler_that_fails_is_not_used(folder: Path) -> None:
    def sampler(logits: torch.Tensor, batch: StepBatch) -> None:
        raise RuntimeError("Failed to find C compiler.")

    lines = Lines()
    runner = assembled(folder, lines, kernels=Kernels(TORCH_OPS, sampler), capture=lambda run: run)
    assert lines.details("tokens are sampled by the host")["reason"] == "RuntimeError: Failed to find C compiler."
    assert run(runner, PROMPTS, [greedy(6)] * 2).outputs == run(make_runner(folder), PROMPTS, [greedy(6)] * 2).outputs


def largest_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: ReferenceAttention) -> list[Any]:
    given: list[Any] = []

    def pool_blocks(*_: Any, largest_steps: list[Any], **__: Any) -> int:
        given.extend(largest_steps)
        return 32

    monkeypatch.setattr(assembly, "pool_blocks", pool_blocks)
    assembled(folder, Lines(), choose=lambda _: [Choice(backend, "")])
    return given


class Recorded(ReferenceAttention):
    """Keeps the (query length, sequence length) of each sequence that it attends to, and in which layer."""

    def __init__(self) -> None:
        super().__init__(16)
        self.attended: list[tuple[int, list[tuple[int, int]]]] = []

    def prepare(self, batch: StepBatch) -> None:
        super().prepare(batch)
        self._lens = batch.host_lens

    def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
        self.attended.append((layer, self._lens))
        return super().attend(layer, query, key, value, params)


def test_contexts_that_a_backend_copies_are_part_of_the_largest_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Recorded()
    prompts, contexts = largest_steps(folder, monkeypatch, backend)
    backend.attended.clear()
    prompts()
    assert backend.attended == [], "it has no cache yet"
    contexts()
    rows, context = EngineConfig().max_num_seqs, 256
    lens = [[(1, length)] * (rows - 1) + [(length - 1, length)] for length in (context, context - 1)]
    assert sorted(backend.attended, reverse=True) == [(0, each) for each in lens], "one layer stands for both"


def test_contexts_that_a_backend_reads_where_they_are_take_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Recorded()
    backend.copies_contexts = False
    assert len(largest_steps(folder, monkeypatch, backend)) == 1


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_the_largest_step_is_within_the_positions_that_a_model_has(architecture: str, tmp_path: Path) -> None:
    """Its context is 256 tokens; a step has 2,000 of several sequences. Rotary frequencies are those of before."""
    fields = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
    folder = save_tiny_model(tmp_path / "m", architecture, **(fields if architecture == "llama" else {}))
    model = load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"), Lines()).model
    frequencies = [buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name]
    Gate(model)
    assembly._run_largest_step(model, sample_on_host, 2000, 8)
    after = [buffer for name, buffer in model.named_buffers() if "inv_freq" in name]
    assert all(torch.equal(a, b) for a, b in zip(frequencies, after, strict=True))
    assert bool(frequencies) == (architecture == "llama")


def test_graphs_that_do_not_fit_say_what_to_lower(folder: Path) -> None:
    def capture(_: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    choice = Choice(GraphSafe(16), "the test's")
    with pytest.raises(
        ModelLoadError, match="CUDA graphs: lower max_num_seqs or gpu_memory_utilization, or set enforce"
    ):
        assembled(folder, Lines(), choose=lambda _: [choice], capture=capture)


def test_looking_ahead_is_for_devices_unless_it_is_asked_for(folder: Path) -> None:
    assert make_runner(folder).lookahead == 0
    assert make_runner(folder, async_scheduling=True).lookahead == 1
