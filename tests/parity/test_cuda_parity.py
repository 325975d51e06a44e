"""The same code on a CUDA device: the tokens of the CPU, a pool from the device's memory, the same random bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.generation import Lines, greedy, make_runner, reference_model, run, transformers_greedy
from support.models import VOCABULARY

from inferq.engine import sampler
from inferq.engine.assembly import load_runner
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.config import EngineConfig
from inferq.engine.sequence import SequenceSampling

pytestmark = pytest.mark.gpu
PROMPTS = [[random.Random(n).randrange(3, VOCABULARY) for _ in range(n)] for n in (1, 16, 33)]


def test_greedy_tokens_equal_transformers(tiny_llama_dir: Path) -> None:
    expected = [transformers_greedy(reference_model(tiny_llama_dir), prompt, 12) for prompt in PROMPTS]
    runner = make_runner(tiny_llama_dir, device="cuda")
    assert run(runner, PROMPTS, [greedy(12)] * 3, chunk=20).outputs == expected


@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}, {"async_scheduling": False}], ids=str)
def test_kernels_graphs_and_steps_planned_ahead_change_no_token(tiny_llama_dir: Path, fields: dict[str, bool]) -> None:
    expected = [transformers_greedy(reference_model(tiny_llama_dir), prompt, 12) for prompt in PROMPTS]
    config = EngineConfig(
        model=str(tiny_llama_dir), device="cuda", dtype="float32", attention="triton", max_num_seqs=4, **fields
    )
    lines = Lines()
    runner = load_runner(config, lines)
    assert run(runner, PROMPTS, [greedy(12)] * 3, chunk=20).outputs == expected
    lines.details("modules fused")
    assert any(event == "decode graphs recorded" for _, event, _ in lines.events) == (not config.enforce_eager)


def test_auto_measures_and_says_what(tiny_llama_dir: Path) -> None:
    lines = Lines()
    runner = load_runner(EngineConfig(model=str(tiny_llama_dir), device="cuda", dtype="bfloat16"), lines)
    assert runner.facts.attention in ("flash", "triton", "torch")
    assert "triton" in lines.details("attention chosen")["reason"]


def test_the_pool_is_sized_from_the_devices_memory(tiny_llama_dir: Path) -> None:
    runner = make_runner(tiny_llama_dir, device="cuda", dtype="auto", num_blocks=None, backend=ReferenceAttention(64))
    assert runner.facts.max_model_len == 256
    assert runner.facts.num_blocks == runner.facts.max_num_seqs * 256 // 64


def test_random_bits_are_those_of_the_cpu() -> None:
    requests, positions = [SequenceSampling(max_tokens=1, seed=seed) for seed in range(8)], range(8)
    tokens = torch.arange(50_000)
    on_cpu, on_cuda = (
        sampler.gumbel_noise(sampler._Parameters.of(requests, positions, device).keys, tokens.to(device)).cpu()
        for device in (torch.device("cpu"), torch.device("cuda"))
    )
    torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-5, atol=1e-5)
