"""Rotary embeddings put off until attention, where one kernel rotates and writes the cache.

How a model pairs the numbers of a head is found by trying. A layer that changes its query or key after the rotation,
or that rotates a part of them and puts it back, keeps its own rotation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from inferq.engine.attention.hook import answers_rotary
from inferq.engine.attention.interface import Rotary
from inferq.engine.attention.rotation import FUNCTION, RotaryLayout, deferring, intercept

from .rewrite import Forward, Rewrites, agree, answers, random
from .trace import Call, Rotation, Trace


def intercept_rotations(modules: Iterable[nn.Module]) -> None:
    """Has the modules' rotations seen by a Trace; those whose forward calls its modeling module's function."""
    for module in modules:
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and FUNCTION in code.co_names and FUNCTION in forward.__globals__:
            intercept(forward.__globals__)


def defer_rotations(modules: Iterable[nn.Module], trace: Trace, rewrites: Rewrites) -> int:
    """The number of attention modules whose rotation goes to an attention that takes it."""
    return sum(_defer(module, trace, rewrites) for module in modules)


def _defer(module: nn.Module, trace: Trace, rewrites: Rewrites) -> bool:
    call = trace.only(module)
    layout = _layout(call.rotations[0]) if call is not None and _arrives(call) else None
    if layout is None:
        return False
    rewrites.set_forward(module, _forward(module.forward, layout))
    return True


def _forward(own: Forward, layout: RotaryLayout) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not answers_rotary():
            return own(*args, **kwargs)
        with deferring(layout):
            return own(*args, **kwargs)

    return forward


def _arrives(call: Call) -> bool:
    """Whether the module rotates once, attends once, and attends with what the rotation gave."""
    if len(call.rotations) != 1 or len(call.attended) != 1:
        return False
    rotation = call.rotations[0]
    if len(rotation.inputs) != 4 or not isinstance(rotation.output, tuple) or len(rotation.output) != 2:
        return False
    return all(
        given.dim() == 4 and _is_view(given[0].transpose(0, 1), attended)
        for given, attended in zip(rotation.output, call.attended[0], strict=True)
    )


def _is_view(view: torch.Tensor, other: torch.Tensor) -> bool:
    return view.data_ptr() == other.data_ptr() and view.shape == other.shape and view.stride() == other.stride()


def _layout(rotation: Rotation) -> RotaryLayout | None:
    """That of a rotation, found on random queries and keys with the model's own cos and sin."""
    query, key, cos, sin = rotation.inputs
    if cos.dim() != 3 or cos.shape[0] != 1 or cos.shape != sin.shape:
        return None
    queries, keys = (
        random(*part.shape, like=part, dtype=torch.float32, seed=seed) for seed, part in enumerate((query, key))
    )
    expected = answers(rotation.rotate, queries, keys, cos.float(), sin.float(), **rotation.options)
    if not isinstance(expected, tuple):
        return None
    for layout in _layouts(cos.shape[-1], query.shape[-1]):
        rotary = layout.rotary(cos.float(), sin.float())
        if agree(_rotated(queries, rotary), expected[0]) and agree(_rotated(keys, rotary), expected[1]):
            return layout
    return None


def _layouts(width: int, head_dim: int) -> Iterator[RotaryLayout]:
    """Of `width` columns of cos: each half holds all pairs, or each pair has its two side by side, or there is one."""
    if width <= head_dim:
        yield RotaryLayout(interleaved=False, columns=slice(0, width // 2))
        yield RotaryLayout(interleaved=True, columns=slice(0, width // 2))
        yield RotaryLayout(interleaved=True, columns=slice(0, None, 2))
    if 2 * width <= head_dim:
        yield RotaryLayout(interleaved=False, columns=slice(0, width))
        yield RotaryLayout(interleaved=True, columns=slice(0, width))


def _rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """x [1, heads, tokens, dim]."""
    rotated, rest = x.tensor_split([2 * rotary.cos.shape[-1]], dim=-1)
    if rotary.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    pairs = (first * rotary.cos - second * rotary.sin, second * rotary.cos + first * rotary.sin)
    turned = torch.stack(pairs, -1).flatten(-2) if rotary.interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1)
