"""The flash-attn backend in steps of the engine's own batches, on the strict stand-in for flash-attn."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import ModuleType

import pytest
import torch
from support.models import tiny_model
from support.ragged import Ragged
from support.strict_flash import flash_attn_interface_module, flash_attn_module

from inferq.cuda import flash
from inferq.engine.attention import AttentionParams, LayerShape
from inferq.engine.attention.flash import FlashAttention
from inferq.engine.batch import StepBatch
from inferq.engine.conformance import Gate
from inferq.engine.errors import ModelLoadError
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

HEADS, KV_HEADS, DIM = 4, 2, 16
#: Of two; the other one stays as it is.
LAYER = 1
CPU = torch.device("cpu")
LENGTHS = (259, 6, 258, 12)
#: So many of each sequence's tokens are in the cache before the first step.
CACHED = (250, 0, 240, 0)
#: Steps of (sequence, tokens): chunks of prompts, some of which begin in the middle of a block; decodes beside them;
#: and decodes alone, of which one begins a block.
STEPS = (
    ((0, 8), (1, 4)),
    ((1, 1), (2, 16)),
    ((0, 1), (1, 1), (3, 10)),
    ((2, 1), (3, 1)),
    ((2, 1), (3, 1)),
)
BOTH = pytest.mark.parametrize(
    ("capability", "make"),
    [((8, 0), flash_attn_module), ((9, 0), flash_attn_interface_module)],
    ids=["FlashAttention-2", "FlashAttention-3"],
)


class Case:
    """Sequences of LENGTHS in a cache that is NaN where no token is, whose tokens are computed step by step."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        to_come = [length - cached for length, cached in zip(LENGTHS, CACHED, strict=True)]
        self.ragged = Ragged(to_come, LENGTHS, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=dtype)
        self.query = self.ragged.query.split(to_come)
        self.num_blocks = sum(-(-length // 256) for length in LENGTHS) + 1
        blocks = random.Random(0).sample(range(self.num_blocks), self.num_blocks)
        self.sequences = [
            Sequence(
                key,
                [0] * length,
                length,
                SequenceSampling(max_tokens=1),
                num_computed_tokens=cached,
                block_table=[blocks.pop() for _ in range(-(-length // 256))],
            )
            for key, (length, cached) in enumerate(zip(LENGTHS, CACHED, strict=True))
        ]
        self.backend = FlashAttention()
        self.backend.allocate([LayerShape(KV_HEADS, DIM, DIM)] * 2, self.num_blocks, dtype=dtype, device=CPU)
        self.key_cache, self.value_cache = self.backend._caches[LAYER]
        self.key_cache.fill_(float("nan"))
        self.value_cache.fill_(float("nan"))
        for sequence, cached in zip(self.sequences, CACHED, strict=True):
            if cached:
                first = sequence.block_table[0]
                self.key_cache[first, :, :cached] = self.ragged.keys[sequence.key][:cached].transpose(0, 1)
                # The step that began the block has cleared the rest of it.
                self.value_cache[first] = 0
                self.value_cache[first, :, :cached] = self.ragged.values[sequence.key][:cached].transpose(0, 1)
        self.batch = StepBatch(max_tokens=64, max_seqs=8, max_model_len=600, block_size=256, device=CPU)

    def run(self, step: Seq[tuple[int, int]], params: AttentionParams, rows: int | None = None) -> torch.Tensor:
        """One step, padded to `rows`; the output of one layer."""
        scheduled, parts = [], []
        for index, count in step:
            sequence, cached = self.sequences[index], CACHED[index]
            start = sequence.num_computed_tokens
            end = start + count
            keys, values = self.ragged.keys[index][start:end], self.ragged.values[index][start:end]
            parts.append((self.query[index][start - cached : end - cached], keys, values))
            sequence.token_ids = [0] * end  # as far as they are known: a step of one token is a decode
            scheduled.append(Scheduled(sequence, count))
            sequence.num_computed_tokens = end
        self.batch.fill(scheduled, rows)
        self.backend.prepare(self.batch)
        padding = self.batch.num_tokens - sum(count for _, count in step)
        query, key, value = (
            torch.cat([*tensors, tensors[0].new_full((padding, *tensors[0].shape[1:]), float("nan"))])
            for tensors in zip(*parts, strict=True)
        )
        return self.backend.attend(LAYER, query, key, value, params)

    def run_all(self, params: AttentionParams) -> torch.Tensor:
        """Of all steps, in the order of `ragged.query`."""
        outputs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
        for step in STEPS:
            for (index, _), part in zip(step, self.run(step, params).split([n for _, n in step]), strict=True):
                outputs[index].append(part)
        return torch.cat([torch.cat(parts) for parts in outputs])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], make: Callable[[], ModuleType]) -> ModuleType:
    """The stand-in that is installed, on a card of that capability."""
    made = make()
    monkeypatch.setattr(flash, "compute_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@BOTH
@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(scale=0.3),
        AttentionParams(scale=0.3, window=30),
        AttentionParams(scale=0.3, softcap=2.0),
        AttentionParams(scale=0.3, window=1, softcap=2.0),
    ],
    ids=["plain", "window", "softcap", "window and softcap"],
)
def test_steps_of_prompts_and_decodes(module: ModuleType, params: AttentionParams) -> None:
    case = Case()
    found = case.run_all(params)
    expected = case.ragged.expected(params.scale, params.window, params.softcap)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@BOTH
def test_rows_of_padding_write_nothing_and_get_zeros(module: ModuleType) -> None:
    params = AttentionParams(scale=0.3)
    case = Case()
    for step in STEPS[:3]:
        case.run(step, params)
    caches = (case.key_cache, case.value_cache)
    before = [cache.nan_to_num(nan=9999) for cache in caches]
    found = case.run(STEPS[3], params, rows=4)
    assert (found[2:] == 0).all() and not found[:2].isnan().any()
    changed = [int((cache.nan_to_num(nan=9999) != was).sum()) for cache, was in zip(caches, before, strict=True)]
    assert changed == [2 * KV_HEADS * DIM] * 2


@pytest.mark.parametrize(("capability", "make"), [((8, 0), flash_attn_module)])
def test_only_prompts_take_the_way_with_lengths_on_the_host(module: ModuleType) -> None:
    params = AttentionParams(scale=0.3)
    case = Case()
    called = []
    for step in STEPS[:4]:
        case.run(step, params)
        called.append(list(module.calls))
        module.calls.clear()
    decode, prompt = "flash_attn_with_kvcache", "flash_attn_varlen_func"
    assert called == [[prompt], [decode, prompt], [decode, prompt], [decode]]


@BOTH
def test_a_decode_reads_the_batchs_own_arrays(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph needs it, which would go on reading where it read when it was recorded."""
    params = AttentionParams(scale=0.3)
    case = Case()
    for step in STEPS[:3]:
        case.run(step, params)
    read: list[tuple[int, int]] = []
    decode = case.backend._flash.decode
    monkeypatch.setattr(
        case.backend._flash,
        "decode",
        lambda q, k, v, tables, lens, p: (
            read.append((tables.data_ptr(), lens.data_ptr())) or decode(q, k, v, tables, lens, p)
        ),
    )
    for step in STEPS[3:]:
        case.run(step, params, rows=4)
    assert set(read) == {(case.batch.block_tables.data_ptr(), case.batch.seq_lens.data_ptr())}


@BOTH
def test_what_flash_attn_cannot_do_ends_the_load(module: ModuleType) -> None:
    with pytest.raises(ModelLoadError, match="not in float32"):
        Case(torch.float32)
    backend = FlashAttention()
    with pytest.raises(ModelLoadError, match="of one size"):
        backend.allocate([LayerShape(2, 64, 64), LayerShape(2, 64, 32)], 1, dtype=torch.float16, device=CPU)
    with pytest.raises(ModelLoadError, match="no attention sinks"):
        Case().run(STEPS[0], AttentionParams(scale=0.3, sinks=torch.zeros(HEADS)))


@pytest.mark.parametrize(
    ("capability", "make", "architecture"),
    [
        ((8, 0), flash_attn_module, "llama"),
        ((8, 0), flash_attn_module, "gemma2"),
        ((9, 0), flash_attn_interface_module, "mistral"),
    ],
)
def test_models_pass_the_gate(module: ModuleType, architecture: str) -> None:
    """Without a window, with one in each layer, and with a soft-cap and one in every second layer."""
    Gate(tiny_model(architecture, std=0.2).half()).check(FlashAttention())
    assert module.calls


@pytest.mark.parametrize(("capability", "make"), [((9, 0), flash_attn_interface_module)])
def test_the_gate_says_what_flash_attn_lacks(module: ModuleType) -> None:
    with pytest.raises(ModelLoadError, match=r"^flash-attn has no attention sinks"):
        Gate(tiny_model("gpt_oss").bfloat16()).check(FlashAttention())
