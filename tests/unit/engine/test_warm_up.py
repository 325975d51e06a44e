"""The steps that are run before a service is ready: all forms that its limits allow, and none that they do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generation import Lines, greedy, make_runner, run
from support.models import save_tiny_model
from support.torch_ops import TORCH_OPS

from inferq.engine.assembly import assemble
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.config import EngineConfig
from inferq.engine.decode_graphs import bucket_for, decode_buckets
from inferq.engine.errors import ModelLoadError
from inferq.engine.kernels import Kernels
from inferq.engine.model import load_model
from inferq.engine.pipe import Ready
from inferq.engine.runner import ModelRunner, sample_on_host
from inferq.engine.warm_up import forms_of_steps


def facts(*, seqs: int = 8, tokens: int = 64, blocks: int = 16, block: int = 16, context: int = 64) -> Ready:
    return Ready(
        model="m",
        text_dir="",
        eos_token_ids=[],
        vocab_size=10,
        max_model_len=context,
        num_blocks=blocks,
        block_size=block,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        dtype="",
        device="",
        attention="",
    )


def kinds(ready: Ready) -> set[str]:
    found = set()
    for step in forms_of_steps(ready):
        decodes = sum(item.decodes for item in step)
        if decodes == len(step):
            found.add(f"{decodes} decodes")
        else:
            (prompt,) = step[decodes:]
            whole = "prompt" if prompt.samples else "part"
            found.add(f"{whole} of {prompt.num_query_tokens}" + (" beside a decode" if decodes else ""))
    return found


def test_all_forms_that_a_step_can_have() -> None:
    prompts = {"part of 1", "prompt of 2", "prompt of 2 beside a decode"}
    assert kinds(facts()) == {"1 decodes", "2 decodes", "4 decodes", "8 decodes"} | prompts


@pytest.mark.parametrize("seqs", [1, 3, 21, 513, 700])
def test_every_number_of_decodes_runs_like_one_that_was_tried(seqs: int) -> None:
    buckets = decode_buckets(seqs)
    tried = {len(step) for step in forms_of_steps(facts(seqs=seqs, tokens=1000, blocks=1000))}
    assert {bucket_for(rows, buckets) for rows in range(1, seqs + 1)} <= {bucket_for(rows, buckets) for rows in tried}


def test_no_step_is_larger_than_the_limits_allow() -> None:
    for seqs, tokens, blocks, block, context in itertools.product([1, 2, 9], [1, 2, 3], [1, 2, 40], [1, 16], [1, 2]):
        ready = facts(seqs=seqs, tokens=tokens, blocks=blocks, block=block, context=context)
        for step in forms_of_steps(ready):
            assert 0 < len(step) <= seqs and sum(item.num_query_tokens for item in step) <= tokens
            tables = [item.sequence.block_table for item in step]
            used = [entry for table in tables for entry in table]
            assert len(set(used)) == len(used) and all(entry < blocks for entry in used)
            for item in step:
                assert item.start + item.num_query_tokens <= min(context, len(item.sequence.block_table) * block)
        assert "1 decodes" in kinds(ready)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", std=0.3)


def assembled(folder: Path, lines: Lines, attention: ReferenceAttention) -> ModelRunner:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", num_blocks=32, max_num_seqs=4)
    return assemble(
        load_model(config, lines),
        config,
        lines,
        choose=lambda _: [Choice(attention, "the test's")],
        kernels=Kernels(TORCH_OPS, sample_on_host),
        capture=None,
    )


class Watched(ReferenceAttention):
    """Notes each step on the batch of the service, and does `then`."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__(16)
        self.steps: list[tuple[int, int]] = []
        self._then = then

    def prepare(self, batch: StepBatch) -> None:
        super().prepare(batch)
        if batch.max_seqs == 4:
            self.steps.append((batch.num_decodes, batch.num_seqs))
            self._then()


def test_each_form_is_run_before_a_runner_is_there_and_changes_nothing(folder: Path) -> None:
    lines, watched = Lines(), Watched(lambda: None)
    runner = assembled(folder, lines, watched)
    assert watched.steps == [(4, 4), (2, 2), (1, 1), (0, 1), (0, 1), (1, 2)]
    assert lines.details("steps tried")["steps"] == 6
    prompts = [[5, 6, 7], list(range(3, 40))]
    assert run(runner, prompts, [greedy(6)] * 2).outputs == run(make_runner(folder), prompts, [greedy(6)] * 2).outputs


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("out of resource: shared memory\nHardware limit: 101376"),
            "a step cannot be computed: RuntimeError: out of resource: shared memory",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            "not enough memory for a step beside the KV cache: lower gpu_memory_utilization, num_blocks or "
            "kv_cache_bytes: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
    ],
    ids=["kernel", "memory"],
)
def test_a_form_that_fails_ends_the_start_in_one_line(folder: Path, error: Exception, says: str) -> None:
    def fail() -> Any:
        raise error

    with pytest.raises(ModelLoadError) as e:
        assembled(folder, Lines(), Watched(fail))
    assert str(e.value) == says
