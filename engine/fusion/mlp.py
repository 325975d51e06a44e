"""Gated MLPs: down(activation(gate(x)) * up(x)), with gate and up as one matrix and their product in one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from .joined import join, joined
from .ops import Ops
from .rewrite import Forward, Rewrites, agree, answers, is_plain_linear, random, stand_ins
from .trace import Trace

if TYPE_CHECKING:
    from inferq.cuda.activation import Activation

_ACTIVATIONS: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_ACTIVATION_NAMES: Final = ("act_fn", "activation_fn")


@dataclass(frozen=True, slots=True)
class _Gated:
    """The parts of a gated MLP; `first` is gate and up, or the one module that is both."""

    first: tuple[Any, ...]
    down: Any
    activation: Activation


def fuse_mlps(modules: Iterable[nn.Module], trace: Trace, ops: Ops, rewrites: Rewrites) -> int:
    """The number of MLPs that are fused. Their gate and up weights become views of one matrix, and remain that."""
    return sum(_fuse(module, trace, ops, rewrites) for module in modules)


def _fuse(module: nn.Module, trace: Trace, ops: Ops, rewrites: Rewrites) -> bool:
    parts = _parts(module)
    inputs = trace.plain_inputs(module)
    if parts is None or not inputs or not _is_gated(module, parts):
        return False
    x = random(*inputs[0].shape, like=inputs[0])
    expected = module.forward(x)
    if len(parts.first) == 1:
        forward = _forward(parts, ops, parts.first[0])
    else:
        weight, bias = joined(parts.first)
        forward = _forward(parts, ops, lambda x: F.linear(x, weight, bias))
    if not agree(forward(x), expected):
        return False
    if len(parts.first) > 1:
        join(parts.first, weight, bias)
    rewrites.set_forward(module, forward)
    return True


def _forward(parts: _Gated, ops: Ops, gate_up: Forward) -> Forward:
    def forward(x: torch.Tensor) -> Any:
        return parts.down(ops.gated(gate_up(x), parts.activation))

    return forward


def _parts(module: nn.Module) -> _Gated | None:
    children = dict(module.named_children())
    function = next((getattr(module, name) for name in _ACTIVATION_NAMES if hasattr(module, name)), None)
    activation = _activation(function)
    if activation is None or "down_proj" not in children:
        return None
    if "gate_up_proj" in children:
        return _Gated((children["gate_up_proj"],), children["down_proj"], activation)
    gate, up = children.get("gate_proj"), children.get("up_proj")
    if not (is_plain_linear(gate) and is_plain_linear(up)):
        return None
    alike = gate.weight.shape == up.weight.shape and gate.weight.dtype == up.weight.dtype
    same_bias = (gate.bias is None) == (up.bias is None)
    return _Gated((gate, up), children["down_proj"], activation) if alike and same_bias else None


def _activation(function: Any) -> Activation | None:
    x = torch.linspace(-6, 6, 97)
    answer = answers(function, x)
    return next((name for name, known in _ACTIVATIONS.items() if agree(answer, known(x))), None)


def _is_gated(module: nn.Module, parts: _Gated) -> bool:
    width = getattr(parts.down, "out_features", 16)
    like = next(module.parameters())
    x, gate, up, down = random(4, 5, width, like=like, dtype=torch.float32)
    expected = (_ACTIVATIONS[parts.activation](x * gate) * (x * up)).roll(1, -1) * down
    first: tuple[Forward, ...] = (lambda x: x * gate, lambda x: x * up)
    if len(parts.first) == 1:
        first = (lambda x: torch.cat([x * gate, x * up], -1),)
    forwards = dict(zip(parts.first, first, strict=True)) | {parts.down: lambda x: x.roll(1, -1) * down}
    with stand_ins(forwards):
        return agree(answers(module.forward, x), expected)
