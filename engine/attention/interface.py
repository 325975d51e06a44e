"""Attention over a paged KV cache, as an interface: what a layer asks for, and what a backend must do.

Only a backend allocates, writes and reads the cache; everybody else sees block ids. One pool a layer, K and V each
`[blocks, kv_heads, block_size, head_dim]`. This file knows no model and no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from inferq.engine.batch import StepBatch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for a token: `num_kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends, beyond being causal.

    `window` W lets a token see itself and the W - 1 tokens before it; None is the whole context. `softcap` c turns a
    score s into c * tanh(s / c). `sinks` [heads] are logits that take part in the softmax and carry no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """How one layer was seen to attend: what a backend must be able to do, and is chosen by."""

    shape: LayerShape
    num_heads: int  #: of queries
    params: AttentionParams

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that take a backend the same work."""
        params = self.params
        return self.shape, self.num_heads, params.scale, params.window, params.softcap, params.sinks is not None

    def zeros(self, tokens: int, *, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """What `LayerAttention.attend` gets from this layer for so many tokens, by name; all of it zero."""
        shape = self.shape
        dims = {
            "query": (self.num_heads, shape.key_dim),
            "key": (shape.num_kv_heads, shape.key_dim),
            "value": (shape.num_kv_heads, shape.value_dim),
        }
        return {name: torch.zeros(tokens, *dim, dtype=dtype, device=device) for name, dim in dims.items()}


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotation of queries and keys by position: cos and sin [tokens, R/2], for the first R numbers of each head.

    Pair i is (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) where `interleaved`; (a, b) becomes
    (a cos - b sin, b cos + a sin). What is beyond R stays as it is. The last dimension of both is contiguous.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


class LayerAttention(Protocol):
    """What answers a model's layers during one forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """query [tokens, heads, key_dim], key and value [tokens, kv_heads, dim] -> [tokens, heads, value_dim]."""
        ...


class RotaryLayerAttention(LayerAttention, Protocol):
    """One that can rotate, too. Whoever has the method gets the rotations of models that are fused for it."""

    def attend_rotary(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
        rotary: Rotary,
    ) -> torch.Tensor:
        """As `attend`, of a query and a key that are not rotated yet."""
        ...


class AttentionBackend(LayerAttention, Protocol):
    """Owns the KV cache.

    A step is `prepare(batch)` and then one `attend` a layer, which writes the step's keys and values into the cache
    and lets each token see its sequence's cache up to itself (causal, aligned at the end of the sequence). What else
    is in the cache, a neighbour's tokens or what is left of a former owner, never reaches a result, not even as NaN.
    """

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> str:
        """What computes it, with its version, for a log; known after `allocate`."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    @property
    def graph_safe(self) -> bool:
        """True if a decode step reads its lengths from the batch's tensors alone, rows of padding among them."""
        ...

    @property
    def copies_contexts(self) -> bool:
        """True if `attend` takes memory for the contexts that it reads, beside the cache."""
        ...

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Replaces the cache by one of `num_blocks` blocks for each of `layers`, in the order of their indices."""
        ...

    def prepare(self, batch: StepBatch) -> None:
        """Takes in what the layers of the next step have in common."""
        ...


#: A layer's pools of keys and values, each [blocks, kv_heads, block_size, dim].
KVCache = tuple[torch.Tensor, torch.Tensor]


def make_cache(
    shape: LayerShape, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Pools for one layer; what is in them is left to chance."""

    def pool(dim: int) -> torch.Tensor:
        return torch.empty(num_blocks, shape.num_kv_heads, block_size, dim, dtype=dtype, device=device)

    return pool(shape.key_dim), pool(shape.value_dim)


def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """What one block takes over all layers, in bytes."""
    return block_size * sum(shape.token_bytes(dtype) for shape in layers)
