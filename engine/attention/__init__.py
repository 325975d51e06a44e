"""Attention over the paged KV cache: the interface, its torch reference, and the hook into transformers' models."""

from __future__ import annotations

from .interface import AttentionBackend, AttentionParams, LayerProbe, LayerShape, Rotary, block_bytes

__all__ = ["AttentionBackend", "AttentionParams", "LayerProbe", "LayerShape", "Rotary", "block_bytes"]
