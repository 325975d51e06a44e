"""The gated activations of a feed-forward layer, on the output of one fused gate and up projection."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl

from .strides import require_dense_rows

Activation = Literal["silu", "gelu", "gelu_tanh"]

_TILE: Final = 1024


def gated_launch(activation: Activation) -> dict[str, Any]:
    """What `gated_kernel` is specialised by and launched with. Eight bf16 elements a thread are 16 bytes."""
    return {"ACTIVATION": activation, "TILE": _TILE, "num_warps": _TILE // (32 * 8)}


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [..., 2 * intermediate] -> act(gate) * up [..., intermediate], contiguous, in the same dtype.

    The gate is the first half of the last dimension. `gelu` is the exact one, with erf; `gelu_tanh` its approximation.
    Computed in float32 and rounded once. Raises ValueError where the last dimension is not contiguous.
    """
    require_dense_rows(gate_up=gate_up)
    rows = gate_up.flatten(0, -2)
    intermediate = gate_up.shape[-1] // 2
    output = gate_up.new_empty(*gate_up.shape[:-1], intermediate)
    if output.numel():
        grid = (len(rows), triton.cdiv(intermediate, _TILE))
        gated_kernel[grid](rows, output, rows.stride(0), intermediate, **gated_launch(activation))
    return output


@triton.jit
def gated_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    intermediate: tl.tensor,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One row and TILE columns a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < intermediate
    gates = gate_up + row * row_stride + columns
    gate = tl.load(gates, mask=mask).to(tl.float32)
    up = tl.load(gates + intermediate, mask=mask).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(output + row * intermediate + columns, (activated * up).to(output.dtype.element_ty), mask=mask)
