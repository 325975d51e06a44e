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
from inferq.engine.errors import SettingError

from .interface import AttentionParams, KVCache, LayerShape
from .paged import PagedAttention

if TYPE_CHECKING:
    from inferq.engine.batch import StepBatch


class FlashAttention(PagedAttention):
    """An AttentionBackend. A step of decodes alone reads the batch's own arrays, and no length on the host."""

    name = "flash"
    block_size = PAGE_TOKENS

    def __init__(self) -> None:
        super().__init__()
        self._flash: Flash | None = None
        self._prompts: Prompts | None = None

    @property
    def kernels(self) -> str:
        return "flash-attn" if self._flash is None else self._flash.name

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
        super().allocate(layers, num_blocks, dtype=dtype, device=device)

    def prepare(self, batch: StepBatch) -> None:
        super().prepare(batch)
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

    def _read(self, query: torch.Tensor, cache: KVCache, params: AttentionParams) -> torch.Tensor:
        """Raises ModelLoadError for an attention that flash-attn does not have."""
        assert self._flash is not None
        batch, decodes = self._batch, self._batch.num_decodes
        with _told_at_load():
            sinks = params.sinks is not None
            check_heads(num_heads=query.shape[1], num_kv_heads=cache[0].shape[1], sinks=sinks)
        flash_params = FlashParams(params.scale, params.window, params.softcap)
        parts = []
        if decodes:
            tables, seq_lens = batch.block_tables[:decodes], batch.seq_lens[:decodes]
            parts.append(self._flash.decode(query[:decodes], *cache, tables, seq_lens, flash_params))
        if self._prompts is not None:
            parts.append(self._flash.prefill(query[decodes:], *cache, self._prompts, flash_params))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _clear(self, batch: StepBatch) -> None:
        """Takes a former owner's values out of the step's new blocks, where a prefill reads behind a sequence's end.

        Their weight there is 0, but 0 * NaN is NaN. FlashAttention-2 and each decode clear what they load instead, and
        the scores of a former owner's keys are masked, not multiplied. So a block that a decode begins needs nothing.
        """
        if self._flash is not None and self._flash.reads_past_end and len(batch.new_blocks):
            for _, value_cache in self._caches:
                value_cache.index_fill_(0, batch.new_blocks, 0)


@contextmanager
def _told_at_load() -> Iterator[None]:
    try:
        yield
    except FlashUnsupportedError as exc:
        raise SettingError("attention", str(exc)) from exc
