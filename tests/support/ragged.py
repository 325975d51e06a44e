"""Queries of sequences of different lengths over a paged cache, as a step has them, and what they must come to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .paged_oracle import attention, make_pages


class Ragged:
    """`query_lens` tokens at the end of sequences of `seq_lens` tokens, which lie in blocks in random order.

    `query` [tokens, heads, dim], behind one another; the caches, `block_tables`, `seq_lens`, `keys` and `values` are
    those of `make_pages`; `query_starts` int32.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 64,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = {"kv_heads": kv_heads, "key_dim": dim, "value_dim": dim, "block": 256}
        pages = make_pages(seq_lens, dtype=dtype, generator=generator, **sizes)
        self.key_cache, self.value_cache, self.block_tables = pages.key_cache, pages.value_cache, pages.tables
        self.seq_lens, self.keys, self.values = pages.seq_lens, pages.keys, pages.values
        self.query_lens = list(query_lens)
        self.query = torch.randn(sum(query_lens), heads, dim, generator=generator).to(dtype)
        self.query_starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)

    def expected(self, scale: float, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """float64 [tokens, heads, dim]; zeros for the tokens of a sequence of length 0."""
        return torch.cat(
            [
                attention(query, key, value, scale=scale, window=window, softcap=softcap)
                if len(key)
                else torch.zeros(query.shape, dtype=torch.float64)
                for query, key, value in zip(self.query.split(self.query_lens), self.keys, self.values, strict=True)
            ]
        )
