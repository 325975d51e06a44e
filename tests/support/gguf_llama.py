"""A Llama computed from a GGUF file as GGML computes it: an oracle for what was converted from the file.

It reads tensors under their GGUF names, rotates neighbouring pairs (GGML's layout of query and key rows, not that of
transformers), and shares no code with the conversion. float32, no cache, one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize


class GgufLlama:
    def __init__(self, path: Path) -> None:
        reader = GGUFReader(str(path))
        self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {
            tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in reader.tensors
        }
        self.blocks, self.heads, self.kv_heads, self.dim = (
            int(self.value(f"llama.{name}"))
            for name in ("block_count", "attention.head_count", "attention.head_count_kv", "rope.dimension_count")
        )

    def value(self, name: str) -> Any:
        """A field of the file's metadata."""
        return self._metadata[name]

    def last_logits(self, token_ids: Seq[int]) -> torch.Tensor:
        """The logits [vocabulary] after the last token."""
        hidden = self.tensors["token_embd.weight"][list(token_ids)]
        for block in range(self.blocks):
            hidden = hidden + self._attention(block, self._norm(hidden, f"blk.{block}.attn_norm"))
            hidden = hidden + self._feed_forward(block, self._norm(hidden, f"blk.{block}.ffn_norm"))
        return self._norm(hidden[-1], "output_norm") @ self.tensors["token_embd.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.value("llama.attention.layer_norm_rms_epsilon")
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * self.tensors[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, dim]: numbers 2i and 2i + 1 are one pair."""
        frequency = self.value("llama.rope.freq_base") ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = torch.outer(torch.arange(len(x)), frequency).unsqueeze(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(pairs, -1).flatten(-2)

    def _attention(self, block: int, x: torch.Tensor) -> torch.Tensor:
        def project(name: str, heads: int) -> torch.Tensor:
            return (x @ self.tensors[f"blk.{block}.attn_{name}.weight"].T).view(len(x), heads, self.dim)

        query = self._rotate(project("q", self.heads))
        key = self._rotate(project("k", self.kv_heads)).repeat_interleave(self.heads // self.kv_heads, 1)
        value = project("v", self.kv_heads).repeat_interleave(self.heads // self.kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.dim**-0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value)
        return mixed.flatten(1) @ self.tensors[f"blk.{block}.attn_output.weight"].T

    def _feed_forward(self, block: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.tensors[f"blk.{block}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
