"""The engine end to end on the Triton kernels: fused modules, decode graphs, steps planned ahead.

The oracle is the plain torch attention in an engine without any of these.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from support.generation import Lines, greedy, make_runner, run
from support.models import VOCABULARY, save_tiny_model
from support.recorded import RerunRecorder

from inferq.engine import AsyncInferenceEngine, EngineConfig, SamplingParams
from inferq.engine.assembly import assemble
from inferq.engine.attention.backends import choose_backends
from inferq.engine.kernels import load_kernels
from inferq.engine.model import load_model
from inferq.engine.runner import ModelRunner
from inferq.engine.sequence import SequenceSampling

#: Around the edges of tiles and blocks of 64, and more of them than run at once.
LENGTHS = (1, 17, 63, 64, 70)
PROMPTS = [[random.Random(length).randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
SAMPLINGS = [
    greedy(3),
    SequenceSampling(max_tokens=5, temperature=0.9, seed=1),
    SequenceSampling(max_tokens=6, temperature=1.2, top_k=7, top_p=0.9, seed=-2),
    greedy(6),
    SequenceSampling(max_tokens=4, temperature=0.7, top_p=0.8, seed=3),
]


def triton_runner(folder: Path, recorder: RerunRecorder, lines: Lines, **fields: object) -> ModelRunner:
    settings = {"dtype": "float32", "device": "cpu", "num_blocks": 12, "attention": "triton"} | fields
    config = EngineConfig(model=str(folder), **settings)
    choose = partial(choose_backends, config.attention, None)
    return assemble(load_model(config, lines), config, lines, choose=choose, kernels=load_kernels(), capture=recorder)


def check(folder: Path, **fields: object) -> tuple[RerunRecorder, Lines]:
    expected = run(make_runner(folder), PROMPTS, SAMPLINGS).outputs
    recorder, lines = RerunRecorder(), Lines()
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 48} | fields
    runner = triton_runner(folder, recorder, lines, **limits)
    assert run(runner, PROMPTS, SAMPLINGS).outputs == expected
    return recorder, lines


def test_the_tokens_are_those_of_the_torch_reference_with_everything_on(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", std=0.3)
    recorder, lines = check(folder, async_scheduling=True)
    assert len(recorder.recorded) == 3 and recorder.replays >= 5
    fused = lines.details("modules fused")
    assert fused["norms"] and fused["mlps"] and fused["layers"] and fused["rotations"], fused


@pytest.mark.slow(family="interpreted engines", share=0)
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "qwen3", "gpt2"])
def test_windows_caps_sinks_and_other_layers(architecture: str, tmp_path: Path) -> None:
    check(save_tiny_model(tmp_path / architecture, architecture, std=0.3), async_scheduling=False)


async def test_the_engines_process_serves_on_triton_kernels(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", std=0.3)
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", num_blocks=8, attention="triton", max_num_seqs=2
    )
    async with AsyncInferenceEngine(config) as engine:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        completion = await engine.complete(prompt_token_ids=PROMPTS[1], sampling=params)
    assert list(completion.token_ids) == run(make_runner(folder), [PROMPTS[1]], [greedy(4)]).outputs[0]
