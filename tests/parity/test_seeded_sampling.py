"""A sampled text depends on its request alone: not on neighbours, order, chunks or preemption. All in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.generation import greedy, make_runner, run
from support.models import VOCABULARY

from inferq.engine.runner import ModelRunner
from inferq.engine.sequence import SequenceSampling

TOKENS = 16
PROMPTS = [[random.Random(seed).randrange(3, VOCABULARY) for _ in range(9 + 8 * seed)] for seed in range(4)]
A = SequenceSampling(max_tokens=TOKENS, temperature=0.8, seed=42)
OTHERS = [
    SequenceSampling(max_tokens=TOKENS, temperature=1.0, top_k=64, top_p=0.95, seed=7),
    greedy(TOKENS),
    SequenceSampling(max_tokens=TOKENS, temperature=1.3, top_k=9999999, seed=1),
]


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "looking ahead"])
def runner(tiny_llama_dir: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(tiny_llama_dir, async_scheduling=request.param)


@pytest.fixture(scope="module")
def alone(tiny_llama_dir: Path) -> list[list[int]]:
    return run(make_runner(tiny_llama_dir), PROMPTS, [A, *OTHERS], together=False).outputs


def test_sampling_is_not_greedy(runner: ModelRunner, alone: list[list[int]]) -> None:
    assert alone[0] != run(runner, PROMPTS[:1], [greedy(TOKENS)]).outputs[0]


def test_another_seed_gives_another_text(runner: ModelRunner, alone: list[list[int]]) -> None:
    other = SequenceSampling(max_tokens=TOKENS, temperature=0.8, seed=43)
    assert run(runner, PROMPTS[:1], [other]).outputs[0] != alone[0]


def test_a_batch_of_all_kinds_gives_each_its_own(runner: ModelRunner, alone: list[list[int]]) -> None:
    for _ in range(2):
        assert run(runner, PROMPTS, [A, *OTHERS]).outputs == alone


def test_order_does_not_matter(runner: ModelRunner, alone: list[list[int]]) -> None:
    swapped = run(runner, PROMPTS[::-1], [A, *OTHERS][::-1])
    assert swapped.outputs[::-1] == alone


@pytest.mark.parametrize("chunk", [2, 11])
def test_chunks_do_not_matter(runner: ModelRunner, alone: list[list[int]], chunk: int) -> None:
    assert run(runner, PROMPTS, [A, *OTHERS], chunk=chunk).outputs == alone


def test_preemption_does_not_matter(tiny_llama_dir: Path, alone: list[list[int]]) -> None:
    tight = run(make_runner(tiny_llama_dir, block_size=4), PROMPTS, [A, *OTHERS], num_blocks=28)
    assert tight.preemptions > 0
    assert tight.outputs == alone


def test_a_resumed_request_goes_on_as_undisturbed(runner: ModelRunner, alone: list[list[int]]) -> None:
    published = alone[0][:5]
    resumed = SequenceSampling(max_tokens=TOKENS - 5, temperature=0.8, seed=42)
    assert run(runner, [PROMPTS[0] + published], [resumed]).outputs[0] == alone[0][5:]


@pytest.mark.parametrize("temperature", [1e-10, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy(runner: ModelRunner, temperature: float) -> None:
    tiny = [SequenceSampling(max_tokens=TOKENS, temperature=temperature, seed=seed) for seed in range(4)]
    assert run(runner, PROMPTS, tiny).outputs == run(runner, PROMPTS, [greedy(TOKENS)] * 4).outputs
