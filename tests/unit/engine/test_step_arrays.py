"""Nobody fills a batch's arrays on the host while a device may still read them.

There are two sets of them: before a third filling, the first one's step must have been waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generation import Lines, greedy, run
from support.models import save_tiny_model, tiny_model
from support.torch_ops import TORCH_OPS

from inferq.engine import computation, conformance
from inferq.engine import runner as runner_module
from inferq.engine.assembly import assemble
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.config import EngineConfig
from inferq.engine.conformance import Gate
from inferq.engine.kernels import Kernels
from inferq.engine.model import load_model
from inferq.engine.runner import sample_on_host
from inferq.engine.step_buffers import StepBuffers


@pytest.fixture
def fillings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many fillings and waits there were; the third filling of the same arrays without a wait fails."""
    counted: Counter[str] = Counter()
    unread: Counter[int] = Counter()
    next_arrays = StepBuffers.next_arrays

    def fill(buffers: StepBuffers) -> Any:
        unread[id(buffers)] += 1
        counted["filled"] += 1
        assert unread[id(buffers)] <= 2, "the device may still read what is filled here"
        return next_arrays(buffers)

    def wait(*_: Any) -> None:
        counted["waited"] += 1
        unread.clear()

    monkeypatch.setattr(StepBuffers, "next_arrays", fill)
    for module in (computation, conformance, runner_module):
        monkeypatch.setattr(module, "synchronize", wait)
    tokens = runner_module._Result.tokens

    def read(result: Any) -> list[int]:
        wait()
        return tokens(result)

    monkeypatch.setattr(runner_module._Result, "tokens", read)
    return counted


def test_by_the_gate(fillings: Counter[str]) -> None:
    Gate(tiny_model("llama")).check(ReferenceAttention(4))
    assert fillings["filled"] == 3


class Recordable(ReferenceAttention):
    graph_safe = True

    def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
        if bool((self._slots < 0).any()):  # padding, which is nobody's
            return query.new_zeros(*query.shape[:2], value.shape[-1])
        return super().attend(layer, query, key, value, params)


@pytest.mark.parametrize("lookahead", [False, True])
def test_by_a_start_and_by_the_steps_after_it(lookahead: bool, fillings: Counter[str], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", num_blocks=32, max_num_seqs=9, async_scheduling=lookahead
    )

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def sampler(logits: torch.Tensor, batch: StepBatch) -> None:
        sample_on_host(logits, batch)

    lines = Lines()
    runner = assemble(
        load_model(config, lines),
        config,
        lines,
        choose=lambda _: [Choice(Recordable(16), "the test's")],
        kernels=Kernels(TORCH_OPS, sampler),
        capture=capture,
    )
    assert lines.details("decode graphs recorded")["graphs"] == 5
    before = fillings["filled"]
    run(runner, [[5, 6, 7], list(range(3, 40))], [greedy(6)] * 2)
    assert fillings["filled"] - before >= 6
