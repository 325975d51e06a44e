"""Paged attention by our own Triton kernels: for CUDA devices, and for the CPU under Triton's interpreter.

A step is two launches a layer at most: the sequences at the batch's front that compute one token are decoded, with
their contexts cut into splits, and the others are prefilled. What a decode launch looks like follows from its bucket,
so that a graph can hold it and a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from inferq.cuda.kv_write import kv_write, rope_kv_write
from inferq.cuda.paged_decode import DecodeWorkspace, num_splits, paged_decode
from inferq.cuda.paged_prefill import paged_prefill
from inferq.engine.decode_graphs import bucket_for, decode_buckets

from .interface import AttentionParams, LayerShape, Rotary

if TYPE_CHECKING:
    from inferq.engine.batch import StepBatch

#: Tokens a block: a tile of the decode kernel for heads of up to 128 numbers.
BLOCK_SIZE: Final = 64


class TritonAttention:
    """An AttentionBackend. `max_context` is the longest sequence in tokens, `multiprocessors` those of the device."""

    name = "triton"
    graph_safe = True

    def __init__(self, *, max_seqs: int, max_context: int, multiprocessors: int, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self._buckets = decode_buckets(max_seqs)
        self._rows = (*self._buckets, max_seqs)
        self._max_context = max_context
        self._multiprocessors = multiprocessors
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._scratch: dict[tuple[int, int, int], DecodeWorkspace] = {}
        self._max_query_len = 0

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        def pool(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(num_blocks, heads, self.block_size, dim, dtype=dtype, device=device)

        self._caches = []  # before the new pools are made: both at once might not fit
        self._caches = [
            (pool(shape.num_kv_heads, shape.key_dim), pool(shape.num_kv_heads, shape.value_dim)) for shape in layers
        ]

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch
        prompts = batch.host_lens[batch.num_decodes :]
        self._max_query_len = max((query_len for query_len, _ in prompts), default=0)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        key_cache, value_cache = self._caches[layer]
        kv_write(key, value, key_cache, value_cache, self._batch.slot_mapping)
        return self._read(layer, query, params)

    def attend_rotary(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
        rotary: Rotary,
    ) -> torch.Tensor:
        """`attend` for a query and a key that are still to be rotated: by the kernel that writes the cache."""
        query = rope_kv_write(
            query,
            key,
            value,
            rotary.cos,
            rotary.sin,
            *self._caches[layer],
            self._batch.slot_mapping,
            interleaved=rotary.interleaved,
        )
        return self._read(layer, query, params)

    def _read(self, layer: int, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        batch, caches, decodes = self._batch, self._caches[layer], self._batch.num_decodes
        output = query.new_empty(*query.shape[:2], caches[1].shape[-1])
        if decodes:
            rows = bucket_for(decodes, self._buckets) or decodes
            kv_heads = caches[0].shape[1]
            splits = self._splits(rows, kv_heads)
            paged_decode(
                query[:decodes],
                *caches,
                batch.block_tables[:decodes],
                batch.seq_lens[:decodes],
                output[:decodes],
                scale=params.scale,
                window=params.window,
                softcap=params.softcap,
                sinks=params.sinks,
                splits=splits,
                workspace=self._workspace(rows, splits, kv_heads, output),
            )
        if self._max_query_len:
            paged_prefill(
                query,
                *caches,
                batch.block_tables[decodes:],
                batch.query_starts[decodes:],
                batch.seq_lens[decodes:],
                output,
                max_query_len=self._max_query_len,
                scale=params.scale,
                window=params.window,
                softcap=params.softcap,
                sinks=params.sinks,
            )
        return output

    def _splits(self, rows: int, kv_heads: int) -> int:
        return num_splits(rows, kv_heads, multiprocessors=self._multiprocessors, max_context=self._max_context)

    def _workspace(self, rows: int, splits: int, kv_heads: int, output: torch.Tensor) -> DecodeWorkspace | None:
        """A view of memory that is enough for every bucket: they take turns.

        It is made when it is first needed, which is before any graph is recorded, and kept.
        """
        if splits == 1:
            return None
        _, heads, dim = output.shape
        if (shape := (kv_heads, heads, dim)) not in self._scratch:
            parts = max(each * self._splits(each, kv_heads) for each in self._rows)
            self._scratch[shape] = DecodeWorkspace.allocate(parts, heads, 1, dim, output.device)
        scratch, parts = self._scratch[shape], rows * splits
        return DecodeWorkspace(
            scratch.partial[:parts].view(rows, heads, splits, dim), scratch.lse[:parts].view(rows, heads, splits)
        )
