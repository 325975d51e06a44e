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

from inferq.engine import pool as pool_module
from inferq.engine.assembly import assemble
from inferq.engine.attention import LayerShape
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.config import EngineConfig
from inferq.engine.errors import ModelLoadError
from inferq.engine.kernels import Kernels
from inferq.engine.model import load_model
from inferq.engine.pool import pool_blocks
from inferq.engine.runner import ModelRunner, sample_on_host

LAYERS = [LayerShape(2, 16, 16)] * 2
#: Keys and values of two layers in bfloat16, for one block of 64 tokens.
BLOCK_BYTES = 2 * 2 * (16 + 16) * 2 * 64
GPU = torch.device("cuda")
KERNELS = Kernels(TORCH_OPS, sample_on_host)
PROMPTS = [[5, 6, 7], list(range(3, 40))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", std=0.3)


def assembled(folder: Path, lines: Lines, **parts: Any) -> ModelRunner:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", num_blocks=32)
    choice = Choice(ReferenceAttention(16), "the test's")
    options = {"choose": lambda _: choice, "kernels": KERNELS, "capture": None} | parts
    return assemble(load_model(config, lines), config, lines, **options)


def test_with_kernels_the_model_is_fused_and_says_the_same(folder: Path) -> None:
    lines = Lines()
    outputs = run(assembled(folder, lines), PROMPTS, [greedy(6)] * 2).outputs
    assert outputs == run(make_runner(folder), PROMPTS, [greedy(6)] * 2).outputs
    fused = lines.details("modules fused")
    assert fused["norms"] == 5 and fused["mlps"] == 2
    assert lines.details("attention chosen") == {"backend": "torch", "reason": "the test's"}


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


def test_no_graph_is_recorded_for_a_backend_that_reads_lengths_on_the_host(folder: Path) -> None:
    def capture(_: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("the torch backend takes its lengths from the host")

    assembled(folder, Lines(), capture=capture)


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
        ModelLoadError, match=r"a step: lower max_num_batched_tokens 777 or max_num_seqs 1000: CUDA out of memory"
    ):
        blocks(Memory(10**9, 10**6), monkeypatch, explode, max_num_batched_tokens=777)


def test_graphs_that_do_not_fit_say_what_to_lower(folder: Path) -> None:
    class GraphSafe(ReferenceAttention):
        graph_safe = True

    def capture(_: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    choice = Choice(GraphSafe(16), "the test's")
    with pytest.raises(
        ModelLoadError, match="CUDA graphs: lower max_num_seqs or gpu_memory_utilization, or set enforce"
    ):
        assembled(folder, Lines(), choose=lambda _: choice, capture=capture)


def test_looking_ahead_is_for_devices_unless_it_is_asked_for(folder: Path) -> None:
    assert make_runner(folder).lookahead == 0
    assert make_runner(folder, async_scheduling=True).lookahead == 1
