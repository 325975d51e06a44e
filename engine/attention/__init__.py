"""Attention over the paged KV cache: the interface, its torch reference, and the hook into transformers' models."""

from __future__ import annotations

from typing import Final

from .interface import AttentionBackend, AttentionParams, LayerShape, block_bytes
from .reference import ReferenceAttention

__all__ = ["BACKENDS", "AttentionBackend", "AttentionParams", "LayerShape", "block_bytes", "make_backend"]

#: What `EngineConfig.attention` may name besides `auto`.
BACKENDS: Final = {"reference": ReferenceAttention}


def make_backend(name: str) -> AttentionBackend:
    """The backend of that name; `auto` is the best one there is. Raises ValueError for a name that there is not."""
    chosen = "reference" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    return BACKENDS[chosen]()
