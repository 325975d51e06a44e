"""Attention by flash-attn: decodes by its paged decode, prompts by its paged prefill, in blocks of 256 tokens.

It needs a CUDA device and flash-attn; what either lacks, or a model asks for in vain, is a ModelLoadError, which names
the limit. The gate at load runs each layer once, so that all of it comes to light there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from inferq.cuda.flash import (
    PAGE_TOKENS,
    Flash,
    FlashParams,
    FlashUnsupportedError,
    Prompts,
    check_heads,
    check_layer,
    load_flash,
)
from inferq.cuda.kv_write import kv_write, rope_kv_write
from inferq.engine.errors import ModelLoadError

from .interface import AttentionParams, LayerShape, Rotary

if TYPE_CHECKING:
    from inferq.engine.batch import StepBatch


class FlashAttention:
    """An AttentionBackend. A step of decodes alone reads the batch's own arrays, and no length on the host."""

    name = "flash"
    block_size = PAGE_TOKENS

    def __init__(self) -> None:
        self._flash: Flash | None = None
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._prompts: Prompts | None = None

    @property
    def graph_safe(self) -> bool:
        """Known after `allocate`: not every version of flash-attn leaves the lengths on the device."""
        return self._flash is not None and self._flash.graph_safe

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ModelLoadError where flash-attn is not there, or cannot attend over such a cache."""
        with _told_at_load():
            self._flash = load_flash(device)
            for shape in set(layers):
                check_layer(dtype=dtype, block_size=self.block_size, key_dim=shape.key_dim, value_dim=shape.value_dim)

        def pool(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(num_blocks, heads, self.block_size, dim, dtype=dtype, device=device)

        self._caches = []  # before the new pools are made: both at once might not fit
        self._caches = [
            (pool(shape.num_kv_heads, shape.key_dim), pool(shape.num_kv_heads, shape.value_dim)) for shape in layers
        ]

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch
        self._prompts = None
        decodes = batch.num_decodes
        if prompt_lens := batch.host_lens[decodes:]:
            self._prompts = Prompts(
                block_tables=batch.block_tables[decodes:],
                query_starts=batch.query_starts[decodes:] - decodes,
                seq_lens=batch.seq_lens[decodes:],
                max_query_len=max(query_len for query_len, _ in prompt_lens),
                max_seq_len=max(seq_len for _, seq_len in prompt_lens),
            )
            self._clear(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Raises ModelLoadError for an attention that flash-attn does not have."""
        kv_write(key, value, *self._caches[layer], self._batch.slot_mapping)
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
        assert self._flash is not None
        batch, caches, decodes = self._batch, self._caches[layer], self._batch.num_decodes
        with _told_at_load():
            sinks = params.sinks is not None
            check_heads(num_heads=query.shape[1], num_kv_heads=caches[0].shape[1], sinks=sinks)
        flash_params = FlashParams(params.scale, params.window, params.softcap)
        parts = []
        if decodes:
            tables, seq_lens = batch.block_tables[:decodes], batch.seq_lens[:decodes]
            parts.append(self._flash.decode(query[:decodes], *caches, tables, seq_lens, flash_params))
        if self._prompts is not None:
            parts.append(self._flash.prefill(query[decodes:], *caches, self._prompts, flash_params))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _clear(self, batch: StepBatch) -> None:
        """Takes a former owner's values out of the step's new blocks, where a prefill reads behind a sequence's end.

        Their weight there is 0, but 0 * NaN is NaN. FlashAttention-2 and each decode clear what they load instead, and
        the scores of a former owner's keys are masked, not multiplied. So a block that a decode begins needs nothing.
        """
        if self._flash is not None and self._flash.reads_past_end and batch.new_blocks:
            new_blocks = torch.tensor(batch.new_blocks, device=batch.device)
            for _, value_cache in self._caches:
                value_cache.index_fill_(0, new_blocks, 0)


@contextmanager
def _told_at_load() -> Iterator[None]:
    try:
        yield
    except FlashUnsupportedError as exc:
        raise ModelLoadError(str(exc)) from exc
