"""What the GPU benchmark holds its measurements against: rooflines, the work of attention, and errors of kernels."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))

import torch
from gpu_parts import oracle as gpu_oracle
from gpu_parts import plan as gpu_plan
from gpu_parts.checks import Check
from gpu_parts.shapes import LLAMA_8B, ModelShape, attention_bytes, prefill_flop, roofline_seconds


def test_the_8b_shape_is_llamas() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_8B.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert LLAMA_8B.token_bytes == 131_072
    assert LLAMA_8B.layer_token_bytes == 4096


def test_decoding_reads_k_and_v_of_every_token_once() -> None:
    assert attention_bytes(LLAMA_8B, [2048] * 64) == 64 * 2048 * 8 * 128 * 2 * 2
    assert attention_bytes(LLAMA_8B, [1, 2, 4]) == 7 * 4096


def test_a_step_is_bound_by_memory_or_by_arithmetic() -> None:
    shape = ModelShape(layers=1, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
    parameters = 4 * 2 * (2 * 2 + 2) + 3 * 4 * 8 + 2 * 4 + 4 + 4 * 10
    assert shape.step_parameters == parameters
    assert shape.parameters == parameters + 4 * 10
    contexts = [3, 5]
    memory = (2 * parameters + 8 * 2 * 2 * 2) / 100.0
    assert roofline_seconds(shape, contexts, bytes_per_s=100.0, flop_per_s=1e9) == pytest.approx(memory)
    arithmetic = 2 * parameters * 2 / 50.0
    assert roofline_seconds(shape, contexts, bytes_per_s=1e9, flop_per_s=50.0) == pytest.approx(arithmetic)


def test_the_roofline_of_8b_on_a_card_of_4_tb_a_second() -> None:
    seconds = roofline_seconds(LLAMA_8B, [1024] * 64, bytes_per_s=4.3e12, flop_per_s=790e12)
    assert seconds == pytest.approx((15.01e9 + 64 * 1024 * 131_072) / 4.3e12, rel=1e-3)
    # So many sequences, of so short a context, that the matrix products take longer.
    many = roofline_seconds(LLAMA_8B, [1] * 512, bytes_per_s=4.3e12, flop_per_s=790e12)
    assert many == pytest.approx(2 * LLAMA_8B.step_parameters * 512 / 790e12)


def test_prefill_computes_two_products_for_each_token_that_another_one_sees() -> None:
    shape = ModelShape(layers=1, hidden=4, intermediate=8, heads=3, kv_heads=1, head_dim=2, vocabulary=10)
    assert prefill_flop(shape, 3, 3) == 2 * 2 * 3 * 2 * (1 + 2 + 3)
    assert prefill_flop(shape, 2, 5) == 2 * 2 * 3 * 2 * (4 + 5)
    chunks = [prefill_flop(LLAMA_8B, 2048, length) for length in (2048, 4096, 6144, 8192)]
    assert sum(chunks) == prefill_flop(LLAMA_8B, 8192, 8192)


def test_a_quick_run_decodes_as_a_full_one_does() -> None:
    assert gpu_plan.QUICK.max_context == gpu_plan.FULL.max_context >= max(gpu_plan.FULL.contexts)
    assert set(gpu_plan.QUICK.batches) <= set(gpu_plan.FULL.batches)


def test_an_error_is_the_worst_rows() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    result = expected.clone()
    assert gpu_oracle.row_error(result, expected) == 0
    result[0, 0] += 0.5
    assert gpu_oracle.row_error(result, expected) == pytest.approx(0.1)
    result[1, 1] = 1e-9  # a row that has to be zeros
    assert gpu_oracle.row_error(result, expected) == math.inf
    result[1, 1] = math.nan
    assert gpu_oracle.row_error(result, expected) == math.inf


def test_nan_holds_no_bound() -> None:
    assert Check("k", "c", 0.0, 0.0).holds
    assert not Check("k", "c", math.nan, 1.0).holds
    assert not Check("k", "c", math.inf, 1.0).holds


def test_the_oracle_is_torchs_attention() -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(n, heads, 8, dtype=torch.float64, generator=generator) for n, heads in ((9, 4), (9, 2), (9, 2))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (query, key, value)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    options: dict[str, Any] = {"scale": 8**-0.5, "window": None, "softcap": None, "sinks": None}
    whole = gpu_oracle.attention(query, key, value, **options)
    torch.testing.assert_close(whole, expected)
    # The last tokens of a longer sequence.
    torch.testing.assert_close(gpu_oracle.attention(query[6:], key, value, **options), expected[6:])
    # A window of one token sees itself alone.
    alone = gpu_oracle.attention(query, key, value, **{**options, "window": 1})
    torch.testing.assert_close(alone, value.repeat_interleave(2, dim=1))
    # A sink without end takes everything.
    drowned = gpu_oracle.attention(query, key, value, **{**options, "sinks": torch.full((4,), 1e4)})
    torch.testing.assert_close(drowned, torch.zeros_like(expected))
