"""What backends share whose kernels read the pages: the pools, and writing a step's keys and values into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from inferq.cuda.kv_write import kv_write, rope_kv_write

from .interface import AttentionParams, KVCache, LayerShape, Rotary, make_cache

if TYPE_CHECKING:
    from inferq.engine.batch import StepBatch


class PagedAttention(ABC):
    """An AttentionBackend but for how it reads: `_read` is called when the step's keys and values are in the cache."""

    block_size: int  #: tokens
    copies_contexts = False

    def __init__(self) -> None:
        self._caches: list[KVCache] = []

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._caches = []  # before the new pools are made: both at once might not fit
        self._caches = [make_cache(shape, num_blocks, self.block_size, dtype=dtype, device=device) for shape in layers]

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        kv_write(key, value, *self._caches[layer], self._batch.slot_mapping)
        return self._read(query, self._caches[layer], params)

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
        return self._read(query, self._caches[layer], params)

    @abstractmethod
    def _read(self, query: torch.Tensor, cache: KVCache, params: AttentionParams) -> torch.Tensor:
        """query [tokens, heads, key_dim] -> [tokens, heads, value_dim], of the batch that was prepared."""
