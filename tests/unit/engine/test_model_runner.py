"""What the runner settles at load: its pool, its context, and what it refuses before the first request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.generation import Lines, greedy, make_runner, run
from support.models import save_tiny_model

from inferq.cuda import memory
from inferq.engine import assembly
from inferq.engine.assembly import assemble, load_runner
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.config import EngineConfig
from inferq.engine.core import Runner
from inferq.engine.errors import ModelLoadError, SettingError
from inferq.engine.model import LoadedModel, load_model
from inferq.engine.runner import ModelRunner
from inferq.engine.sequence import Scheduled, Sequence

#: Two layers of 2 KV heads, keys and values of 16 float32 numbers.
TOKEN_BYTES = 2 * 2 * (16 + 16) * 4
CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path, **fields: Any) -> tuple[ModelRunner, Lines]:
    lines = Lines()
    config = EngineConfig(model=str(folder), **({"dtype": "float32", "device": "cpu", "threads": 1} | fields))
    return load_runner(config, lines), lines


def assemble_with_torch(loaded: LoadedModel, config: EngineConfig) -> ModelRunner:
    choice = Choice(ReferenceAttention(), "the test's")
    return assemble(loaded, config, Lines(), choose=lambda _: [choice], kernels=None, capture=None)


def test_the_facts_of_a_loaded_model(folder: Path) -> None:
    runner, lines = load(folder, max_num_seqs=3, max_num_batched_tokens=77)
    facts = runner.facts
    assert (facts.model, facts.text_dir, facts.eos_token_ids, facts.vocab_size) == ("tiny", str(folder), [2], 320)
    assert (facts.max_model_len, facts.block_size, facts.num_blocks) == (CONTEXT, 32, 3 * CONTEXT // 32)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (3, 77)
    assert (facts.dtype, facts.device, facts.attention) == ("float32", "cpu", "torch")
    assert not [line for line in lines.events if line[0] == "warning"]


def test_a_step_that_samples_nothing(folder: Path) -> None:
    sequence = Sequence(0, list(range(9)), 9, greedy(1), block_table=[0])
    as_the_loop_sees_it: Runner = load(folder)[0]
    assert as_the_loop_sees_it.launch([Scheduled(sequence, 5)]).tokens() == []


def test_a_model_without_a_context_needs_max_model_len(folder: Path) -> None:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu")
    loaded = replace(load_model(config, Lines()), context_length=None)
    with pytest.raises(ModelLoadError, match="tiny does not say how long its context is: set max_model_len"):
        assemble_with_torch(loaded, config)
    runner = assemble_with_torch(loaded, replace(config, max_model_len=99))
    assert runner.facts.max_model_len == 99


def test_the_pool_is_what_the_bytes_hold(folder: Path) -> None:
    assert load(folder, kv_cache_bytes=9 * 32 * TOKEN_BYTES + 5)[0].facts.num_blocks == 9


def test_the_pool_follows_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 2 * 10 * 32 * TOKEN_BYTES)
    assert load(folder)[0].facts.num_blocks == 10


def test_the_number_of_blocks_overrides_the_rest(folder: Path) -> None:
    assert load(folder, num_blocks=5, kv_cache_bytes=1)[0].facts.num_blocks == 5


def test_a_pool_smaller_than_the_context_cuts_it_and_says_so(folder: Path) -> None:
    runner, lines = load(folder, num_blocks=5)
    assert runner.facts.max_model_len == 160
    assert ("warning", "context cut to the KV cache", {"wanted": 256, "max_model_len": 160}) in lines.events


def test_a_wanted_context_beyond_the_models_is_cut_and_said(folder: Path) -> None:
    runner, lines = load(folder, max_model_len=1000)
    assert runner.facts.max_model_len == CONTEXT
    assert lines.events[0][:2] == ("warning", "max_model_len cut to the model's context")
    assert load(folder, max_model_len=100)[0].facts.max_model_len == 100


def test_a_pool_too_small_to_be_useful_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"hold 7 blocks .* at least 8 are needed: raise kv_cache_bytes") as caught:
        load(folder, kv_cache_bytes=7 * 32 * TOKEN_BYTES)
    assert caught.value.setting == "kv_cache_bytes"
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 1000)
    with pytest.raises(ModelLoadError, match="at least 8 are needed: free memory"):
        load(folder)


def test_an_unknown_attention_backend_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no attention backend 'xformers'"):
        load(folder, attention="xformers")


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the architecture 'bloom' is not supported"):
        load(save_tiny_model(tmp_path / "bloom", "bloom"), max_model_len=64)


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "gpt_oss"])
def test_whatever_the_forward_pass_can_pick_the_rows_are_right(architecture: str, tmp_path: Path) -> None:
    """With and without `logits_to_keep`: one step with several sequences equals one sequence a step."""
    runner = make_runner(save_tiny_model(tmp_path / architecture, architecture, std=0.3))
    prompts = [[5, 6, 7], [9] * 20, [8]]
    together = run(runner, prompts, [greedy(6)] * 3)
    assert together.outputs == run(runner, prompts, [greedy(6)] * 3, together=False).outputs
    runner._picks_rows = False
    assert together.outputs == run(runner, prompts, [greedy(6)] * 3).outputs


def test_threads_are_set_as_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(assembly.torch, "set_num_threads", asked.append)
    load(folder, threads=3)
    assert asked == [3]
