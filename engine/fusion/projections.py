"""Query, key and value projections as one matrix product.

The attention modules of transformers call the three one after another with the same tensor. The first computes all
three and keeps the others' parts for them; one that is called with another tensor computes its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from .joined import join, joined
from .rewrite import Forward, Rewrites, agree, is_plain_linear, random
from .trace import Call, Trace

_NAMES: Final = ("q_proj", "k_proj", "v_proj")


def fuse_projections(modules: Iterable[nn.Module], trace: Trace, rewrites: Rewrites) -> int:
    """The number of attention modules of which they are one. Their weights become views of it, and remain that."""
    return sum(_fuse(module, trace, rewrites) for module in modules)


def _fuse(module: nn.Module, trace: Trace, rewrites: Rewrites) -> bool:
    linears = [getattr(module, name, None) for name in _NAMES]
    if not all(is_plain_linear(linear) for linear in linears):
        return False
    calls = [trace.only(linear) for linear in linears if linear is not None]
    x = _common_input(calls)
    if x is None or len({call.module.bias is None for call in calls if call is not None}) > 1:
        return False
    ordered: list[Any] = [call.module for call in trace.calls if call in calls]
    weight, bias = joined(ordered)
    product = _OneProduct(ordered, weight, bias)
    probe = random(*x.shape, like=x)
    forwards = product.forwards()
    if not all(agree(forward(probe), linear(probe)) for forward, linear in zip(forwards, ordered, strict=True)):
        return False
    join(ordered, weight, bias)
    for linear, forward in zip(ordered, forwards, strict=True):
        rewrites.set_forward(linear, forward)
    return True


def _common_input(calls: list[Call | None]) -> torch.Tensor | None:
    inputs = [None if call is None else call.only_input for call in calls]
    return inputs[0] if all(x is inputs[0] for x in inputs) else None


class _OneProduct:
    """What the linears of one input have in common, in the order in which they are called."""

    def __init__(self, linears: list[Any], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._linears = linears
        self._weight = weight
        self._bias = bias
        self._sizes = [linear.weight.shape[0] for linear in linears]
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def forwards(self) -> list[Forward]:
        return [self._compute, *(self._follower(index) for index in range(1, len(self._linears)))]

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        self._input = x
        self._parts = torch.split(F.linear(x, self._weight, self._bias), self._sizes, dim=-1)
        return self._parts[0]

    def _follower(self, index: int) -> Forward:
        linear, is_last = self._linears[index], index == len(self._linears) - 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x is not self._input:
                return F.linear(x, linear.weight, linear.bias)
            part = self._parts[index]
            if is_last:
                self._input, self._parts = None, ()
            return part

        return forward
