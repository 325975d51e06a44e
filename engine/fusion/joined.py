"""Linear modules over one matrix: their weights become views of it, so that nothing is kept twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def joined(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights [sum of outputs, inputs] and biases of modules that all have a bias or all have none."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    return weight, bias


def join(linears: Sequence[Any], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Lets the modules' parameters, which remain the same objects, be views of what `joined` gave."""
    sizes = [linear.weight.shape[0] for linear in linears]
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight.data = part
    if bias is not None:
        for linear, part in zip(linears, torch.split(bias, sizes), strict=True):
            linear.bias.data = part
