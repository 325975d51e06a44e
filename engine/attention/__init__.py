"""Attention over the paged KV cache.

What is exported is the interface. `backends.py` names what implements it (`reference.py` in plain torch, `triton.py`,
`flash.py`), `choice.py` measures which is the fastest, and through `hook.py` and `rotation.py` a model calls it.
"""

from __future__ import annotations

from .interface import AttentionBackend, AttentionParams, LayerProbe, LayerShape, Rotary, block_bytes

__all__ = ["AttentionBackend", "AttentionParams", "LayerProbe", "LayerShape", "Rotary", "block_bytes"]
