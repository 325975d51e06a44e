"""RMSNorm against float64, and against the norms of transformers' models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.rounding import assert_rounded_once, assert_same, huge_tensor, nan_in_new_memory
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from inferq.cuda.norm import MAX_WIDTH, add_rms_norm, rms_norm

#: Quick each, and many: a small run takes a share.
pytestmark = pytest.mark.slow

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_lucky_memory() -> Iterator[None]:
    with nan_in_new_memory():
        yield


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 64, 80, 128, 576, 1000, 4096, 5120, 16384, MAX_WIDTH])
def test_it_is_computed_in_float32_and_rounded_once(width: int, dtype: torch.dtype) -> None:
    x, weight = (3 * torch.randn(3, width)).to(dtype), torch.randn(width).to(dtype)
    output = rms_norm(x, weight, EPS)
    assert output.dtype == dtype and output.is_contiguous()
    assert_rounded_once(output, exact(x, weight))


@pytest.mark.parametrize("tokens", [1, 7, 17])
def test_short_rows_share_a_program(tokens: int) -> None:
    x, weight = torch.randn(tokens, 3, 80), torch.randn(80)
    assert_rounded_once(rms_norm(x, weight, EPS), exact(x, weight))


def head_views(dim: int) -> dict[str, torch.Tensor]:
    """Three tokens of five heads, as models have them; what does not belong to the heads is NaN."""
    fused = torch.full((3, 11 * dim), float("nan"))
    fused[:, 4 * dim : 9 * dim] = torch.randn(3, 5 * dim)
    return {
        "contiguous": torch.randn(3, 5, dim),
        "with a batch": torch.randn(1, 3, 5, dim),
        "transposed": torch.randn(5, 3, dim).transpose(0, 1),
        "transposed with a batch": torch.randn(1, 3, 5, dim).transpose(1, 2),
        "a part of a fused projection": fused[:, 4 * dim : 9 * dim].unflatten(1, (5, dim)),
        "every second token": torch.randn(6, 5, dim)[::2],
        "one for all tokens": torch.randn(1, 5, dim).expand(3, 5, dim),
        "a permutation that is no two dimensions": torch.randn(2, 3, 5, dim).permute(2, 1, 0, 3),
        "one head": torch.randn(dim),
    }


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("view", head_views(1))
def test_heads_are_normed_wherever_they_lie(view: str, dim: int) -> None:
    heads, weight = head_views(dim)[view], torch.randn(dim)
    output = rms_norm(heads, weight, EPS)
    assert output.shape == heads.shape and output.is_contiguous()
    assert_rounded_once(output, exact(heads, weight))


@pytest.mark.parametrize("module", [LlamaRMSNorm, GptOssRMSNorm, GemmaRMSNorm])
def test_it_is_what_transformers_models_compute(module: type[torch.nn.Module]) -> None:
    """Gemma keeps its weight less one."""
    norm = module(96, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(96))
    x = torch.randn(4, 96)
    output = rms_norm(x, norm.weight, 1e-5, offset=1.0 if module is GemmaRMSNorm else 0.0)
    torch.testing.assert_close(output, norm(x), rtol=2e-6, atol=1e-6)


def test_squares_do_not_overflow_half_precision() -> None:
    x = torch.full((1, 256), 3000.0, dtype=torch.float16)
    assert_same(rms_norm(x, torch.ones(256), EPS), torch.ones(1, 256, dtype=torch.float16))


def test_eps_counts_where_numbers_are_small() -> None:
    x = torch.tensor([[1e-3] * 64, [0.0] * 64])
    assert_rounded_once(rms_norm(x, torch.ones(64), 1e-5), exact(x, torch.ones(64), 1e-5))


def test_weight_and_x_may_differ_in_dtype() -> None:
    x, weight = torch.randn(2, 64).half(), torch.randn(64)
    assert_rounded_once(rms_norm(x, weight, EPS), exact(x, weight))


@pytest.mark.parametrize("width", [80, 576])
def test_a_row_does_not_depend_on_its_neighbours(width: int) -> None:
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    alone = rms_norm(x[2:3], weight, EPS)
    alone_of_sum = add_rms_norm(x[2:3], residual[2:3].clone(), weight, EPS)
    x[[0, 1, 3, 4]] = float("nan")
    assert_same(rms_norm(x, weight, EPS)[2:3], alone)
    assert_same(add_rms_norm(x, residual, weight, EPS)[2:3], alone_of_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 576, 5120])
def test_the_sum_is_what_torch_adds_and_what_is_normed(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(3, width).to(dtype), (50 * torch.randn(3, width)).to(dtype), torch.randn(width))
    total = residual + x
    output = add_rms_norm(x, residual, weight, EPS, offset=1.0)
    assert_same(residual, total)
    assert_same(output, rms_norm(total, weight, EPS, offset=1.0))
    assert_rounded_once(output, exact(total, weight, offset=1.0))


def test_it_is_the_rounded_sum_that_is_normed() -> None:
    """2048 + 1 is 2048 in half precision, so that the norm knows nothing of the 1."""
    residual = torch.tensor([[2048.0, 1.0] * 32], dtype=torch.float16)
    x = torch.tensor([[1.0, 0.0] * 32], dtype=torch.float16)
    weight = torch.full((64,), 2.0**11)
    output = add_rms_norm(x, residual, weight, EPS)
    assert_rounded_once(output, exact(torch.tensor([[2048.0, 1.0] * 32]), weight))


def test_bfloat16_sums() -> None:
    """Up to the last bit, which the interpreter cuts off rather than rounds."""
    x, residual, weight = torch.randn(3, 96).bfloat16(), torch.randn(3, 96).bfloat16(), torch.ones(96)
    total = residual.double() + x.double()
    output = add_rms_norm(x, residual, weight, EPS)
    assert_rounded_once(residual, total)
    assert_rounded_once(output, exact(residual, weight))


def test_sums_of_strided_rows() -> None:
    wide = torch.full((3, 200), float("nan"))
    residual = wide[:, 50:130].copy_(torch.randn(3, 80))
    x, weight = torch.randn(80, 3).t().contiguous()[None], torch.randn(80)
    total = residual + x
    output = add_rms_norm(x, residual, weight, EPS)
    assert output.shape == x.shape
    assert_same(wide[:, 50:130], total[0])
    assert wide[:, :50].isnan().all() and wide[:, 130:].isnan().all()
    assert_rounded_once(output, exact(total, weight))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), EPS).shape == (0, 64)
    assert add_rms_norm(torch.empty(1, 0, 64), torch.empty(1, 0, 64), torch.ones(64), EPS).shape == (1, 0, 64)


@pytest.mark.parametrize("shape", [(3, 1, 16), (1, 3, 16)])
def test_rows_far_apart(shape: tuple[int, int, int], tmp_path: Path) -> None:
    """The row and the distance fit into 32 bits, and their product does not."""
    distance = 2**30
    rows = huge_tensor(tmp_path, 2 * distance + 16, torch.float16).as_strided(shape, (distance, distance, 1))
    rows.copy_(torch.randn(shape))
    x, weight = torch.randn(shape).half(), torch.randn(16)
    assert_rounded_once(rms_norm(rows, weight, EPS), exact(rows, weight))
    total = rows + x
    assert_rounded_once(add_rms_norm(x, rows, weight, EPS), exact(total, weight))
    assert_same(rows, total)


def test_what_it_refuses() -> None:
    weight = torch.ones(64)
    with pytest.raises(ValueError, match="last dimension of x is not contiguous"):
        rms_norm(torch.randn(64, 3).t(), weight, EPS)
    with pytest.raises(ValueError, match="last dimension of residual is not contiguous"):
        add_rms_norm(torch.randn(3, 64), torch.randn(64, 3).t(), weight, EPS)
    with pytest.raises(ValueError, match=f"rows of {MAX_WIDTH + 1} elements are too wide: at most {MAX_WIDTH}"):
        rms_norm(torch.randn(1, MAX_WIDTH + 1), torch.ones(MAX_WIDTH + 1), EPS)
    scattered = torch.randn(2, 3, 5, 64).permute(2, 1, 0, 3)
    with pytest.raises(RuntimeError, match="view"):
        add_rms_norm(torch.randn(5, 3, 2, 64), scattered, weight, EPS)


@given(tokens=st.integers(1, 9), heads=st.integers(1, 5), width=st.integers(1, 150), transposed=st.booleans())
def test_any_shape(tokens: int, heads: int, width: int, transposed: bool) -> None:
    x = torch.randn(heads, tokens, width).transpose(0, 1) if transposed else torch.randn(tokens, heads, width)
    residual, weight = torch.randn(tokens, heads, width), torch.randn(width)
    total = residual + x
    assert_rounded_once(rms_norm(x, weight, EPS), exact(x, weight))
    assert_rounded_once(add_rms_norm(x, residual, weight, EPS), exact(total, weight))
    assert_same(residual, total)
