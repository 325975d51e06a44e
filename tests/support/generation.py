"""Runs a real model runner under the real scheduler, without a process around them, and compares with transformers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inferq.engine.assembly import assemble
from inferq.engine.attention import AttentionBackend
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.blocks import BlockPool
from inferq.engine.config import EngineConfig
from inferq.engine.core import Launched
from inferq.engine.model import load_model
from inferq.engine.runner import ModelRunner
from inferq.engine.scheduler import Scheduler
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

#: Two logits nearer than this are a tie: which is larger is up to the order in which float32 numbers are added.
NEAR_TIE = 1e-4


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def __call__(self, level: str, event: str, **details: Any) -> None:
        self.events.append((level, event, details))

    def details(self, event: str) -> dict[str, Any]:
        """Of the one line with that event."""
        ((_, _, details),) = [line for line in self.events if line[1] == event]
        return details


@dataclass
class Run:
    outputs: list[list[int]]  #: the new tokens of each request, in the order asked
    preemptions: int
    steps: int


def make_runner(
    folder: Path, *, block_size: int = 16, backend: AttentionBackend | None = None, **config: object
) -> ModelRunner:
    """A runner in float32 on the CPU, with a small pool."""
    settings = {"dtype": "float32", "device": "cpu", "num_blocks": 256, "cache_dir": str(folder.parent)} | config
    engine_config = EngineConfig(model=str(folder), **settings)
    loaded = load_model(engine_config, _no_log)
    chosen = Choice(backend or ReferenceAttention(block_size), "the test's")
    return assemble(loaded, engine_config, _no_log, choose=lambda _: [chosen], kernels=None, capture=None)


def run(
    runner: ModelRunner,
    prompts: Seq[Seq[int]],
    samplings: Seq[SequenceSampling],
    *,
    chunk: int | None = None,
    num_blocks: int | None = None,
    together: bool = True,
) -> Run:
    """Generates for all prompts, `chunk` tokens a step at most, in a pool of `num_blocks` of the runner's blocks."""
    if not together:
        runs = [
            run(runner, [p], [s], chunk=chunk, num_blocks=num_blocks) for p, s in zip(prompts, samplings, strict=True)
        ]
        return Run([each.outputs[0] for each in runs], sum(r.preemptions for r in runs), sum(r.steps for r in runs))
    pool = BlockPool(num_blocks or runner.facts.num_blocks, runner.facts.block_size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=runner.facts.max_num_seqs,
        max_num_batched_tokens=chunk or runner.facts.max_num_batched_tokens,
    )
    sequences = [
        Sequence(key, list(prompt), len(prompt), sampling)
        for key, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    steps = 0
    in_flight: deque[tuple[list[Scheduled], Launched]] = deque()
    while scheduler.has_work or in_flight:
        scheduled = scheduler.schedule()
        if scheduled:
            in_flight.append((scheduled, runner.launch(scheduled)))
            steps += 1
        while len(in_flight) > (runner.lookahead if scheduled else 0):
            before, launched = in_flight.popleft()
            scheduler.update(before, launched.tokens())
    assert pool.num_used == 0
    outputs = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
    return Run(outputs, scheduler.num_preemptions, steps)


def greedy(max_tokens: int, *stop_token_ids: int) -> SequenceSampling:
    return SequenceSampling(max_tokens=max_tokens, temperature=0.0, stop_token_ids=frozenset(stop_token_ids))


def reference_model(folder: Path) -> PreTrainedModel:
    """The same weights in transformers' own hands: eager attention, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def transformers_greedy(model: PreTrainedModel, prompt: Seq[int], max_tokens: int, *stop_token_ids: int) -> list[int]:
    """What `generate` of transformers adds to the prompt."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_token_ids) or None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def assert_same_tokens(model: PreTrainedModel, prompt: Seq[int], expected: Seq[int], actual: Seq[int]) -> None:
    """Equal, or parting where the model itself has a near tie."""
    if list(expected) == list(actual):
        return
    common = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    assert common is not None, f"one is cut short: {expected} and {actual}"
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *expected[:common]]]), use_cache=False).logits[0, -1]
    gap = abs(float(logits[expected[common]] - logits[actual[common]]))
    assert gap < NEAR_TIE, f"token {common}: {expected} and {actual} part at a gap of {gap}"


def _no_log(*_: object, **__: object) -> None:
    pass
