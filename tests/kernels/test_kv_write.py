"""Writing into the paged cache, and rotating on the way, against float64 and against transformers' rotations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.pairs import covering
from support.rounding import assert_rounded_once, assert_same, huge_tensor, nan_in_new_memory
from transformers import Cohere2Config, GlmConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere2 import modeling_cohere2 as cohere2
from transformers.models.glm import modeling_glm as glm
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama

from inferq.cuda.kv_write import kv_write, rope_kv_write

#: Quick each, and many: a small run takes a share.
pytestmark = pytest.mark.slow

BLOCK = 16
NUM_BLOCKS = 4


class Shape(NamedTuple):
    """Of a layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


#: One head, groups, as many of each; dims of a power of two and not, and values smaller than keys.
SHAPES = [Shape(1, 1, 64, 64), Shape(9, 3, 64, 64), Shape(8, 2, 80, 80), Shape(3, 3, 24, 16), Shape(17, 1, 128, 96)]
LAYOUTS = ["contiguous", "transposed", "fused"]
CACHES = ["blocks of heads", "blocks of tokens", "keys and values interleaved"]


@pytest.fixture(autouse=True)
def no_lucky_memory() -> Iterator[None]:
    with nan_in_new_memory():
        yield


def step(tokens: int, shape: Shape, layout: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key and value [tokens, heads, dim], as they come out of a model."""
    sizes = [(shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim)]
    if layout == "contiguous":
        return [torch.randn(tokens, *size).to(dtype) for size in sizes]
    if layout == "transposed":
        return [torch.randn(1, heads, tokens, dim).to(dtype)[0].transpose(0, 1) for heads, dim in sizes]
    fused = torch.randn(tokens, sum(heads * dim for heads, dim in sizes)).to(dtype)
    parts = fused.split([heads * dim for heads, dim in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]


def caches(shape: Shape, kind: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, kv_heads, BLOCK, dim], full of NaN."""

    def empty(dim: int) -> torch.Tensor:
        if kind == "blocks of heads":
            return torch.empty(NUM_BLOCKS, shape.kv_heads, BLOCK, dim, dtype=dtype)
        if kind == "blocks of tokens":
            return torch.empty(NUM_BLOCKS, BLOCK, shape.kv_heads, dim, dtype=dtype).transpose(1, 2)
        return torch.empty(NUM_BLOCKS, 2, shape.kv_heads, BLOCK, dim, dtype=dtype)[:, 1]

    return empty(shape.key_dim), empty(shape.value_dim)


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, pairs]."""
    angle = 10 * torch.randn(tokens, pairs)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, dim] in float64, pair by pair, as products of complex numbers."""
    x, turn = x.double(), torch.complex(cos.double(), sin.double())
    rotary = 2 * cos.shape[-1]
    pairs = x[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(first, second) * turn[:, None]
    rotated = torch.stack([turned.real, turned.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([rotated, x[..., rotary:]], -1)


def written(cache: torch.Tensor, entries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What `cache` must be, in float64: only where `slots` says so it differs from before."""
    expected = cache.double()
    for entry, slot in zip(entries, slots.tolist(), strict=True):
        if slot >= 0:
            expected[slot // BLOCK, :, slot % BLOCK] = entry.double()
    return expected


def some_slots(tokens: int) -> torch.Tensor:
    """One each, in any order; every third token has none."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK)[:tokens]
    slots[2::3] = -1
    return slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_go_to_their_slots_and_nowhere_else(layout: str, cache_kind: str, dtype: torch.dtype) -> None:
    shape = Shape(8, 2, 80, 48)
    _, key, value = step(7, shape, layout, dtype)
    key_cache, value_cache = caches(shape, cache_kind, dtype)
    slots = some_slots(7)
    expected = written(key_cache, key, slots), written(value_cache, value, slots)
    kv_write(key, value, key_cache, value_cache, slots)
    assert_same(key_cache.double(), expected[0])
    assert_same(value_cache.double(), expected[1])


@pytest.mark.parametrize(
    "case",
    covering(
        shape=SHAPES,
        layout=LAYOUTS,
        cache_kind=CACHES,
        interleaved=[False, True],
        share=[1.0, 0.5, 0.25],
        dtype=[torch.float32, torch.float16, torch.bfloat16],
    ),
    ids=str,
)
def test_query_and_key_are_rotated_and_rounded_once(case: dict) -> None:
    shape, dtype, interleaved = case["shape"], case["dtype"], case["interleaved"]
    query, key, value = step(4, shape, case["layout"], dtype)
    key_cache, value_cache = caches(shape, case["cache_kind"], dtype)
    cos, sin = angles(4, int(shape.key_dim * case["share"]) // 2)
    slots = some_slots(4)
    expected_key = written(key_cache, rotate(key, cos, sin, interleaved=interleaved), slots)
    expected_value = written(value_cache, value, slots)
    rotated = rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved=interleaved)
    assert rotated.is_contiguous() and rotated.dtype == dtype
    assert_rounded_once(rotated, rotate(query, cos, sin, interleaved=interleaved))
    assert_rounded_once(key_cache, expected_key)
    assert_same(value_cache.double(), expected_value)
    rotary = 2 * cos.shape[-1]
    assert_same(rotated[..., rotary:], query[..., rotary:])
    assert_same(key_cache[..., rotary:].double(), expected_key[..., rotary:])


LLAMA = (llama, llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4)))
NEOX = (gpt_neox, gpt_neox.GPTNeoXRotaryEmbedding(GPTNeoXConfig(hidden_size=256, num_attention_heads=4)))
GLM = (glm, glm.GlmRotaryEmbedding(GlmConfig(head_dim=64)))
COHERE2 = (cohere2, cohere2.Cohere2RotaryEmbedding(Cohere2Config(hidden_size=256, num_attention_heads=4)))


@pytest.mark.parametrize(
    ("model", "interleaved", "pairs"),
    [
        (LLAMA, False, slice(None, 32)),
        (NEOX, False, slice(None, 8)),
        (GLM, True, slice(None, 16)),
        (COHERE2, True, slice(None, None, 2)),
    ],
    ids=["llama", "gpt_neox", "glm", "cohere2"],
)
def test_it_is_what_transformers_models_rotate(model: tuple, interleaved: bool, pairs: slice) -> None:
    """Two of each kind: all of a head's dims, and some. `pairs` are a model's angles without their repetition."""
    module, embedding = model
    query, key, value = torch.randn(1, 4, 5, 64), torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64)
    cos, sin = embedding(value, torch.tensor([[0, 1, 7, 300, 4000]]))
    expected_query, expected_key = module.apply_rotary_pos_emb(query, key, cos, sin)
    cos, sin = cos[0, :, pairs].contiguous(), sin[0, :, pairs].contiguous()
    key_cache, value_cache = caches(Shape(4, 2, 64, 64), "blocks of heads")
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    rotated = rope_kv_write(*flat, cos, sin, key_cache, value_cache, torch.arange(5), interleaved=interleaved)
    torch.testing.assert_close(rotated, expected_query[0].transpose(0, 1), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(key_cache[0, :, :5], expected_key[0], rtol=1e-5, atol=2e-6)


def test_padded_rows_write_nothing() -> None:
    """Not even where they are all that there is; their queries are rotated all the same."""
    shape = Shape(4, 2, 32, 32)
    query, key, value = step(3, shape, "contiguous")
    key_cache, value_cache = caches(shape, "blocks of heads")
    cos, sin = angles(3, 16)
    nowhere = torch.full((3,), -1)
    kv_write(key, value, key_cache, value_cache, nowhere)
    rotated = rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, nowhere, interleaved=False)
    assert key_cache.isnan().all() and value_cache.isnan().all()
    assert_rounded_once(rotated, rotate(query, cos, sin, interleaved=False))


def test_nan_of_a_padded_row_stays_in_it() -> None:
    shape = Shape(4, 2, 32, 32)
    query, key, value = step(3, shape, "contiguous")
    cos, sin = angles(3, 16)
    for tensor in (query, key, value, cos, sin):
        tensor[1] = float("nan")
    key_cache, value_cache = (cache.zero_() for cache in caches(shape, "blocks of heads"))
    slots = torch.tensor([5, -1, 6])
    rotated = rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved=True)
    assert not key_cache.isnan().any() and not value_cache.isnan().any()
    assert not rotated[[0, 2]].isnan().any()


def test_no_tokens() -> None:
    shape = Shape(4, 2, 32, 16)
    query, key, value = step(0, shape, "contiguous")
    key_cache, value_cache = caches(shape, "blocks of heads")
    slots = torch.empty(0, dtype=torch.int64)
    kv_write(key, value, key_cache, value_cache, slots)
    rotated = rope_kv_write(query, key, value, *angles(0, 16), key_cache, value_cache, slots, interleaved=False)
    assert rotated.shape == (0, 4, 32)
    assert key_cache.isnan().all() and value_cache.isnan().all()


def test_first_and_last_slot() -> None:
    shape = Shape(1, 1, 16, 16)
    _, key, value = step(2, shape, "contiguous")
    key_cache, value_cache = caches(shape, "blocks of heads")
    kv_write(key, value, key_cache, value_cache, torch.tensor([NUM_BLOCKS * BLOCK - 1, 0]))
    assert_same(key_cache[-1, 0, -1], key[0, 0])
    assert_same(value_cache[0, 0, 0], value[1, 0])


def test_angles_may_be_part_of_wider_rows_and_of_the_models_dtype() -> None:
    shape = Shape(2, 1, 16, 16)
    query, key, value = step(3, shape, "contiguous")
    cos, sin = (angle.half() for angle in angles(3, 16))
    key_cache, value_cache = caches(shape, "blocks of heads")
    some = cos[:, 4:12], sin[:, 4:12]
    rotated = rope_kv_write(query, key, value, *some, key_cache, value_cache, torch.arange(3), interleaved=False)
    assert_rounded_once(rotated, rotate(query, *some, interleaved=False))


def test_a_cache_of_lower_precision_is_rounded_to() -> None:
    shape = Shape(2, 1, 16, 16)
    query, key, value = step(3, shape, "contiguous")
    cos, sin = angles(3, 8)
    key_cache, value_cache = caches(shape, "blocks of heads", torch.float16)
    slots = torch.arange(3)
    kv_write(key, value, key_cache, value_cache, slots)
    assert_same(key_cache[0, 0, :3], key[:, 0].half())
    rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved=False)
    assert_rounded_once(key_cache[0, :, :3], rotate(key, cos, sin, interleaved=False).transpose(0, 1))


def test_slots_far_apart(tmp_path: Path) -> None:
    """The block and a block's size fit into 32 bits, and their product does not."""
    shape = Shape(1, 1, 16, 16)
    query, key, value = step(2, shape, "contiguous", torch.float16)
    strides = (2**30, BLOCK * 16, 16, 1)
    cache = huge_tensor(tmp_path, 2 * 2**30 + BLOCK * 16, torch.float16).as_strided((3, 1, BLOCK, 16), strides)
    slots = torch.tensor([2 * BLOCK + 1, 5])
    kv_write(key, value, cache, torch.empty(3, 1, BLOCK, 16), slots)
    assert_same(cache[2, 0, 1], key[0, 0])
    cos, sin = torch.ones(2, 8), torch.zeros(2, 8)
    rope_kv_write(query, value, key, cos, sin, cache, torch.empty(3, 1, BLOCK, 16), slots, interleaved=False)
    assert_same(cache[2, 0, 1], value[0, 0])
    assert_same(cache[0, 0, 5], value[1, 0])


@pytest.mark.parametrize("far_apart", ["tokens", "heads"])
def test_tokens_and_heads_far_apart(far_apart: str, tmp_path: Path) -> None:
    """Their number and the distance fit into 32 bits, and their product does not."""
    distance, tokens_first = 2**30, far_apart == "tokens"
    strides = (distance, 16, 1) if tokens_first else (16, distance, 1)
    x = huge_tensor(tmp_path, 2 * distance + 64, torch.float16).as_strided((3, 3, 16), strides)
    x.copy_(torch.randn(3, 3, 16))
    cos, sin, slots = *angles(3, 8), torch.tensor([1, 5, 40])
    key_cache, value_cache = caches(Shape(3, 3, 16, 16), "blocks of heads", torch.float16)
    expected_key, expected_value = written(key_cache, x, slots), written(value_cache, x, slots)
    kv_write(x, x, key_cache, value_cache, slots)
    assert_same(key_cache.double(), expected_key)
    assert_same(value_cache.double(), expected_value)
    rotated = rope_kv_write(x, x, x, cos, sin, key_cache, value_cache, slots, interleaved=False)
    assert_rounded_once(rotated, rotate(x, cos, sin, interleaved=False))
    assert_same(key_cache[[0, 0, 2], :, [1, 5, 8]], rotated)
    assert_same(value_cache.double(), expected_value)


def test_what_it_refuses() -> None:
    shape = Shape(2, 1, 32, 32)
    query, key, value = step(2, shape, "contiguous")
    key_cache, value_cache = caches(shape, "blocks of heads")
    slots = torch.arange(2)
    with pytest.raises(ValueError, match="last dimension of key_cache is not contiguous"):
        kv_write(key, value, key_cache.transpose(2, 3), value_cache, slots)
    cos, sin = angles(2, 32)
    with pytest.raises(ValueError, match="last dimension of cos is not contiguous"):
        rope_kv_write(query, key, value, cos[:, ::2], sin, key_cache, value_cache, slots, interleaved=True)
    with pytest.raises(ValueError, match="64 dimensions of a head cannot rotate: it has 32"):
        rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved=True)


@given(data=st.data(), interleaved=st.booleans(), layout=st.sampled_from(LAYOUTS), cache_kind=st.sampled_from(CACHES))
def test_any_shape(data: st.DataObject, interleaved: bool, layout: str, cache_kind: str) -> None:
    dims = st.integers(1, 70)
    kv_heads, key_dim = data.draw(st.integers(1, 4)), data.draw(dims.filter(lambda dim: dim > 1))
    shape = Shape(kv_heads * data.draw(st.integers(1, 4)), kv_heads, key_dim, data.draw(dims))
    tokens, pairs = data.draw(st.integers(1, 3)), data.draw(st.integers(1, key_dim // 2))
    query, key, value = step(tokens, shape, layout)
    cos, sin = angles(tokens, pairs)
    slots = some_slots(tokens)
    for rope in (False, True):
        key_cache, value_cache = caches(shape, cache_kind)
        entries = rotate(key, cos, sin, interleaved=interleaved) if rope else key
        expected_key, expected_value = written(key_cache, entries, slots), written(value_cache, value, slots)
        if rope:
            rotated = rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slots, interleaved=interleaved)
            assert_rounded_once(rotated, rotate(query, cos, sin, interleaved=interleaved))
        else:
            kv_write(key, value, key_cache, value_cache, slots)
        assert_rounded_once(key_cache, expected_key)
        assert_same(value_cache.double(), expected_value)
