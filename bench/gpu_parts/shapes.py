"""What a step of decoding must move and compute, as arithmetic over the model's shape: bytes, operations, the roofline.

Standard library only. Sizes are in bytes and elements, times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Llama: untied embeddings, no biases, gated MLP, one KV cache of 2-byte numbers a layer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    itemsize: int = 2

    @property
    def step_parameters(self) -> int:
        """Those that every step multiplies with: all but the input embeddings, of which a step reads a row a token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden
        return self.layers * (attention + mlp + norms) + self.hidden + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.step_parameters + self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights, at least."""
        return self.step_parameters * self.itemsize

    @property
    def all_weight_bytes(self) -> int:
        """What the device has to hold."""
        return self.parameters * self.itemsize

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.layers * self.layer_token_bytes


LLAMA_8B: Final = ModelShape(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128256
)


def attention_bytes(shape: ModelShape, contexts: Sequence[int]) -> int:
    """K and V that one layer reads to decode a token of each sequence."""
    return shape.layer_token_bytes * sum(contexts)


def prefill_flop(shape: ModelShape, query_len: int, seq_len: int) -> int:
    """What one layer's causal attention computes for the last `query_len` of `seq_len` tokens.

    A query token's key with that of each token it sees, and that one's value with its weight: 2 products of head_dim
    numbers, each a multiplication and an addition, for every query head.
    """
    before = seq_len - query_len
    seen = query_len * before + query_len * (query_len + 1) // 2
    return 2 * 2 * shape.heads * shape.head_dim * seen


def roofline_seconds(shape: ModelShape, contexts: Sequence[int], *, bytes_per_s: float, flop_per_s: float) -> float:
    """The least that a step takes which decodes a token of each sequence: its memory traffic, or its matrix products.

    max((W + sum of contexts * KV bytes a token) / bandwidth, 2 * parameters * sequences / FLOP/s). A context counts the
    token that is decoded.
    """
    memory = (shape.weight_bytes + shape.token_bytes * sum(contexts)) / bytes_per_s
    arithmetic = 2 * shape.step_parameters * len(contexts) / flop_per_s
    return max(memory, arithmetic)
