"""Greedy tokens are those of transformers' own `generate`, however the work is cut into steps. All in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.generation import (
    assert_same_tokens,
    greedy,
    make_runner,
    reference_model,
    run,
    transformers_greedy,
)
from support.models import VOCABULARY
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from inferq.engine.runner import ModelRunner

NEW_TOKENS = 24
EOS = 2
#: Around the edges of blocks of 16 tokens, and the shortest prompt there is.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 70)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = (
    CHAT.format("What is the capital of France?"),
    "def fibonacci(n):\n    ",
    "🦙🦙🦙🦙🦙🦙🦙🦙",
)


def random_prompt(length: int) -> list[int]:
    return [random.Random(length).randrange(3, VOCABULARY) for _ in range(length)]


PROMPTS = [random_prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "looking ahead"])
def runner(tiny_llama_dir: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(tiny_llama_dir, async_scheduling=request.param)


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> PreTrainedModel:
    return reference_model(tiny_llama_dir)


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> list[list[int]]:
    return [transformers_greedy(reference, prompt, NEW_TOKENS, EOS) for prompt in PROMPTS]


def check(reference: PreTrainedModel, expected: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, wanted, output in zip(PROMPTS, expected, outputs, strict=True):
        assert_same_tokens(reference, prompt, wanted, output)


def test_the_tiny_model_is_worth_comparing(expected: list[list[int]]) -> None:
    assert len({token for output in expected for token in output}) > 40


@pytest.mark.parametrize("together", [False, True], ids=["one at a time", "batched"])
def test_tiny_llama_equals_transformers(
    runner: ModelRunner, reference: PreTrainedModel, expected: list[list[int]], together: bool
) -> None:
    result = run(runner, PROMPTS, [greedy(NEW_TOKENS, EOS)] * len(PROMPTS), together=together)
    check(reference, expected, result.outputs)


@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_chunked_prefill_equals_whole(
    runner: ModelRunner, reference: PreTrainedModel, expected: list[list[int]], chunk: int
) -> None:
    result = run(runner, PROMPTS, [greedy(NEW_TOKENS, EOS)] * len(PROMPTS), chunk=chunk)
    check(reference, expected, result.outputs)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_size_changes_nothing(
    tiny_llama_dir: Path, reference: PreTrainedModel, expected: list[list[int]], block_size: int
) -> None:
    runner = make_runner(tiny_llama_dir, block_size=block_size, num_blocks=1024)
    check(reference, expected, run(runner, PROMPTS, [greedy(NEW_TOKENS, EOS)] * len(PROMPTS), chunk=40).outputs)


def test_preempted_request_goes_on_as_undisturbed(runner: ModelRunner, reference: PreTrainedModel) -> None:
    prompts = [random_prompt(34), random_prompt(35)]
    tight = run(runner, prompts, [greedy(35)] * 2, num_blocks=8)
    assert tight.preemptions > 0
    for prompt, output in zip(prompts, tight.outputs, strict=True):
        assert len(output) == 35
        assert_same_tokens(reference, prompt, transformers_greedy(reference, prompt, 35), output)


def test_preempted_again_and_again(runner: ModelRunner, reference: PreTrainedModel) -> None:
    prompts = [random_prompt(length) for length in (20, 21, 22, 23)]
    tight = run(runner, prompts, [greedy(60)] * 4, num_blocks=8, chunk=24)
    assert tight.preemptions > 1
    for prompt, output in zip(prompts, tight.outputs, strict=True):
        assert_same_tokens(reference, prompt, transformers_greedy(reference, prompt, 60), output)


def test_smollm2_equals_transformers_alone_and_batched(demo_model_dir: Path) -> None:
    reference = reference_model(demo_model_dir)
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    runner = make_runner(demo_model_dir, block_size=32)
    stop = runner.facts.eos_token_ids
    batched = run(runner, prompts, [greedy(48, *stop)] * len(prompts), chunk=24)
    for prompt, output in zip(prompts, batched.outputs, strict=True):
        assert_same_tokens(reference, prompt, transformers_greedy(reference, prompt, 48, *stop), output)
    alone = run(runner, prompts[1:2], [greedy(48, *stop)])
    assert_same_tokens(reference, prompts[1], alone.outputs[0], batched.outputs[1])
    assert "Paris" in tokenizer.decode(batched.outputs[0])
