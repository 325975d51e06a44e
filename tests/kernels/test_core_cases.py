"""One case of each kernel whose other tests are all left to a share of a small run: every run computes these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.rounding import assert_rounded_once, assert_same, nan_in_new_memory

from inferq.cuda.kv_write import kv_write, rope_kv_write
from inferq.cuda.norm import add_rms_norm, rms_norm

BLOCK = 16
SLOTS = torch.tensor([20, -1, 3])


@pytest.fixture(autouse=True)
def no_lucky_memory() -> Iterator[None]:
    with nan_in_new_memory():
        yield


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "after an add"])
def test_norm(adds: bool) -> None:
    x, residual, weight = (torch.randn(*shape, dtype=torch.float16) for shape in [(3, 576), (3, 576), (576,)])
    wide = (x + residual if adds else x).double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1.0 + weight.double())
    if adds:
        total = x + residual
        assert_rounded_once(add_rms_norm(x, residual, weight, 1e-6, offset=1.0), expected)
        assert_same(residual, total)
    else:
        assert_rounded_once(rms_norm(x, weight, 1e-6, offset=1.0), expected)


@pytest.mark.parametrize("rotates", [False, True], ids=["as they are", "rotated"])
def test_kv_write(rotates: bool) -> None:
    query, key, value = (torch.randn(3, heads, 24, dtype=torch.float16) for heads in (6, 2, 2))
    key_cache, value_cache = (torch.zeros(2, 2, BLOCK, 24, dtype=torch.float16) for _ in range(2))
    expected = key.double()
    if rotates:
        turn = torch.randn(3, 12)
        cos, sin = turn.cos(), turn.sin()
        rotated = rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, SLOTS, interleaved=False)
        assert_rounded_once(rotated, rotation(query, cos, sin))
        expected = rotation(key, cos, sin)
    else:
        kv_write(key, value, key_cache, value_cache, SLOTS)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            assert_rounded_once(key_cache[slot // BLOCK, :, slot % BLOCK], expected[token])
            assert_same(value_cache[slot // BLOCK, :, slot % BLOCK], value[token])
    assert int(value_cache.any(-1).sum()) == 2 * 2, "something else was written"


def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] in float64; the pairs are the halves of a head."""
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
