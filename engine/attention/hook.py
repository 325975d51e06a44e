"""The door through which a transformers model calls our attention.

The model runs on a flat `[1, tokens]` batch, without a cache object and without a mask: a name that has an attention
function and no mask function makes transformers skip the mask. Whoever runs the forward pass says by `attending` who
answers its layers; a keyword argument would not reach the layers of every architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeGuard

import torch
from transformers import AttentionInterface

from .interface import AttentionParams, LayerAttention, RotaryLayerAttention
from .rotation import take_deferred

IMPLEMENTATION: Final = "inferq_paged"
_answering: ContextVar[LayerAttention] = ContextVar("inferq_answering_attention")


@contextmanager
def attending(attention: LayerAttention) -> Iterator[None]:
    """Within it, each layer of a model that uses IMPLEMENTATION calls `attention.attend`."""
    token = _answering.set(attention)
    try:
        yield
    finally:
        _answering.reset(token)


def answers_rotary() -> bool:
    """Whether we are `attending`, and by one that rotates."""
    return rotates(_answering.get(None))


def rotates(attention: LayerAttention | None) -> TypeGuard[RotaryLayerAttention]:
    """Whether it takes queries and keys that are still to be rotated."""
    return hasattr(attention, "attend_rotary")


class ZeroAttention:
    """A LayerAttention that answers zeros: for a pass of which only shapes or memory are of interest."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim] -> [1, tokens, heads, dim]."""
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    attention = _answering.get()
    rotary = take_deferred(query, key) if rotates(attention) else None
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    index = getattr(module, "layer_idx", None)
    layer = -1 if index is None else int(index)
    if rotates(attention) and rotary is not None:
        output = attention.attend_rotary(layer, query, key, value, params, rotary)
    else:
        output = attention.attend(layer, query, key, value, params)
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
