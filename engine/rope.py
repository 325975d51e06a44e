"""Rotary embeddings whose frequencies depend on the longest sequence of a batch, made to depend on none.

transformers chooses the frequencies of `longrope` and `dynamic` models in each forward pass, by the largest position
in it. In a batch of many requests one long sequence would so change all the others, against what is in their cache.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_FROZEN: Final = "frozen"


def freeze_rotary_frequencies(model: torch.nn.Module, max_model_len: int) -> bool:
    """Keeps the frequencies that transformers chooses for a sequence of `max_model_len` tokens.

    True if the model has any to keep. Sequences within the original context are then computed as transformers does
    where `max_model_len` is within it too; for a longer one all use the long frequencies.
    """
    frozen = [_freeze(module, max_model_len) for module in model.modules()]
    return any(frozen)


def _freeze(module: Any, max_model_len: int) -> bool:
    """Rotary modules have a type, or one for each type of layer."""
    rope_type = getattr(module, "rope_type", None)
    types: dict[str | None, str] = rope_type if isinstance(rope_type, dict) else {None: rope_type or ""}
    changing = [layer for layer, kind in types.items() if kind == "longrope" or "dynamic" in kind]
    for layer in changing:
        like = next(module.buffers())
        last = torch.tensor([[max_model_len - 1]], device=like.device)
        module(like, last, **({} if layer is None else {"layer_type": layer}))
    if changing:
        frozen = {layer: _FROZEN if layer in changing else kind for layer, kind in types.items()}
        module.rope_type = frozen if isinstance(rope_type, dict) else _FROZEN
    return bool(changing)
