"""Paged attention by our own Triton kernels: for CUDA devices, and for the CPU under Triton's interpreter.

A step is two launches a layer at most: the sequences at the batch's front that compute one token are decoded, with
their contexts cut into splits, and the others are prefilled. What a decode launch looks like follows from its bucket,
so that a graph can hold it and a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from inferq.cuda.availability import triton_version
from inferq.cuda.paged_decode import DecodeWorkspace, num_splits, paged_decode
from inferq.cuda.paged_prefill import paged_prefill
from inferq.engine.decode_graphs import bucket_for, decode_buckets

from .interface import AttentionParams, KVCache
from .paged import PagedAttention

if TYPE_CHECKING:
    from inferq.engine.batch import StepBatch

#: Tokens a block: a tile of the decode kernel for heads of up to 128 numbers.
BLOCK_SIZE: Final = 64


class TritonAttention(PagedAttention):
    """An AttentionBackend. `max_context` is the longest sequence in tokens, `multiprocessors` those of the device."""

    name = "triton"
    kernels = f"triton {triton_version()}"
    graph_safe = True
    block_size = BLOCK_SIZE

    def __init__(self, *, max_seqs: int, max_context: int, multiprocessors: int) -> None:
        super().__init__()
        self._buckets = decode_buckets(max_seqs)
        self._max_seqs = max_seqs
        self._max_context = max_context
        self._multiprocessors = multiprocessors
        self._scratch: dict[tuple[int, int, int], DecodeWorkspace] = {}
        self._max_query_len = 0

    def prepare(self, batch: StepBatch) -> None:
        super().prepare(batch)
        prompts = batch.host_lens[batch.num_decodes :]
        self._max_query_len = max((query_len for query_len, _ in prompts), default=0)

    def _read(self, query: torch.Tensor, cache: KVCache, params: AttentionParams) -> torch.Tensor:
        batch, decodes = self._batch, self._batch.num_decodes
        output = query.new_empty(*query.shape[:2], cache[1].shape[-1])
        if decodes:
            rows, kv_heads = bucket_for(decodes, self._buckets) or decodes, cache[0].shape[1]
            splits = self._splits(rows, kv_heads)
            paged_decode(
                query[:decodes],
                *cache,
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
                *cache,
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
        """More rows than the largest bucket has are not padded, and are split like it."""
        return num_splits(
            min(rows, self._buckets[-1]),
            kv_heads,
            multiprocessors=self._multiprocessors,
            max_context=self._max_context,
        )

    def _workspace(self, rows: int, splits: int, kv_heads: int, output: torch.Tensor) -> DecodeWorkspace | None:
        """A view of memory that is enough for every number of rows there can be: they take turns.

        It is made when it is first needed, and anew for more rows than there can be in service, as the gate may have:
        both before any graph is recorded.
        """
        if splits == 1:
            return None
        _, heads, dim = output.shape
        shape, parts = (kv_heads, heads, dim), rows * splits
        if shape not in self._scratch or len(self._scratch[shape].lse) < parts:
            most = max(each * self._splits(each, kv_heads) for each in (*self._buckets, self._max_seqs, rows))
            self._scratch[shape] = DecodeWorkspace.allocate(most, heads, 1, dim, output.device)
        scratch = self._scratch[shape]
        return DecodeWorkspace(
            scratch.partial[:parts].view(rows, heads, splits, dim), scratch.lse[:parts].view(rows, heads, splits)
        )
