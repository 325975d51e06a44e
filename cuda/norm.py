"""RMSNorm, by itself and fused with the residual addition before it.

Of hidden states [tokens, hidden], and of heads, as query and key norms need it: [tokens, heads, dim], a transposed view
or a part of a fused projection.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from .strides import require_dense_rows

#: A row is one tile, held in registers; of 32 warps this leaves 32 elements to a thread.
MAX_WIDTH: Final = 32768


def rms_norm_launch(width: int) -> dict[str, int]:
    """What `rms_norm_kernel` is specialised by and launched with, for rows of `width` elements.

    Short rows share a program. Sixteen bf16 elements a thread are two 16-byte loads.
    """
    tile = triton.next_power_of_2(width)
    rows = max(1, 1024 // tile)
    return {"WIDTH": width, "ROWS": rows, "TILE": tile, "num_warps": max(1, min(32, rows * tile // (32 * 16)))}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """x [..., width] over the root of its rows' mean square, times offset + weight [width]; contiguous, in x's dtype.

    Computed in float32 and rounded once. Raises ValueError for rows wider than MAX_WIDTH, and where the last dimension
    is not contiguous.
    """
    require_dense_rows(x=x)
    return _launch(_as_rows(x), None, weight, eps, offset).view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """Adds x to residual, both [..., width], in place, and returns the RMSNorm of the sum as `rms_norm` does.

    It is the sum as rounded to residual's dtype that is normed, as by a model that adds first. Raises ValueError as
    `rms_norm` does, and RuntimeError for a residual whose leading dimensions do not make one or two.
    """
    require_dense_rows(x=x, residual=residual)
    rows = _as_rows(x)
    return _launch(rows, residual.view(rows.shape), weight, eps, offset).view(x.shape)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[outer, inner, width], without a copy unless x has three leading dimensions that do not make two."""
    if x.dim() == 1:
        return x[None, None]
    return x[:, None] if x.dim() == 2 else x.flatten(0, -3)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """x and residual [outer, inner, width]."""
    outer, inner, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements are too wide: at most {MAX_WIDTH}")
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        launch = rms_norm_launch(width)
        residual_strides = (0, 0) if residual is None else (residual.stride(0), residual.stride(1))
        rms_norm_kernel[(triton.cdiv(outer * inner, launch["ROWS"]),)](
            x,
            residual,
            weight,
            output,
            outer * inner,
            inner,
            x.stride(0),
            x.stride(1),
            *residual_strides,
            float(eps),
            float(offset),
            **launch,
        )
    return output


# The numbers of rows change from step to step; a variant for each kind of number would be compiled while requests wait.
@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_inner: tl.tensor,
    x_stride_outer: tl.tensor,
    x_stride_inner: tl.tensor,
    residual_stride_outer: tl.tensor,
    residual_stride_inner: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """ROWS rows a program; `residual` may be None."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, TILE)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    outer = (rows // num_inner).to(tl.int64)[:, None]
    inner = (rows % num_inner).to(tl.int64)[:, None]
    values = tl.load(x + outer * x_stride_outer + inner * x_stride_inner + columns[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    if residual is not None:
        places = residual + outer * residual_stride_outer + inner * residual_stride_inner + columns[None, :]
        values += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=mask)
        values = rounded.to(tl.float32)
    inverse_root = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    factors = offset + tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed = values * inverse_root[:, None] * factors[None, :]
    tl.store(
        output + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], normed.to(output.dtype.element_ty), mask=mask
    )
