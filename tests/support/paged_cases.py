"""What the tests of the paged attention kernels share: their cases, and sequences in a cache to try a case with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .paged_oracle import attention, make_pages

KV_HEADS = 2
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

#: What a case has, and the values that the grid of cases takes.
GRID: dict[str, list[Any]] = {
    "dims": [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (40, 72)],  # of a key, of a value
    "group": [1, 3, 4, 8],  # query heads a KV head
    "block": [16, 32, 48, 64, 256],
    "dtype": [torch.float16, torch.float32],
    "window": [None, 1, 17, 64, 10_000],
    "softcap": [None, 5.0],
    "sinks": [False, True],
    "strided": [False, True],
}
PLAIN: dict[str, Any] = {
    "dims": (128, 128),
    "group": 4,
    "block": 32,
    "dtype": torch.float16,
    "window": None,
    "softcap": None,
    "sinks": False,
    "strided": False,
}
#: All at once, and blocks that are smaller than a tile.
SPECIAL: dict[str, Any] = {
    "dims": (80, 40),
    "group": 3,
    "block": 16,
    "dtype": torch.float32,
    "window": 20,
    "softcap": 5.0,
    "sinks": True,
    "strided": True,
}


def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


class Sequences:
    """Sequences of `totals` tokens in a paged cache, and what a case asks of the attention to them."""

    def __init__(self, case: dict[str, Any], totals: Sequence[int]) -> None:
        self._generator = torch.Generator().manual_seed(1)
        (self.key_dim, self.value_dim), self.dtype = case["dims"], case["dtype"]
        self.heads, self._strided = KV_HEADS * case["group"], case["strided"]
        self.pages = make_pages(
            totals,
            kv_heads=KV_HEADS,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            block=case["block"],
            dtype=self.dtype,
            generator=self._generator,
            token_major=self._strided,
        )
        sinks = 2 * torch.randn(self.heads, generator=self._generator)
        self.params = {
            "scale": 1.3 * self.key_dim**-0.5,
            "window": case["window"],
            "softcap": case["softcap"],
            "sinks": sinks.to(self.dtype) if case["sinks"] else None,
        }

    def draw(self, tokens: int) -> torch.Tensor:
        """Queries [tokens, heads, key_dim]."""
        return torch.randn(tokens, self.heads, self.key_dim, generator=self._generator).to(self.dtype)

    def placed(self, query: torch.Tensor) -> torch.Tensor:
        """These queries, with NaN between their rows if the case is `strided`."""
        if not self._strided:
            return query
        around = nan(len(query), self.heads + 3, self.key_dim + 5, dtype=self.dtype)
        return around[:, 1:-2, 2:-3].copy_(query)

    def written(self, rows: int, write: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """[rows, heads, value_dim] as `write` fills them, NaN where it does not. It writes nowhere else."""
        around = nan(rows, self.heads + 2, self.value_dim + 3, dtype=self.dtype)
        output = around[:, 1:-1, :-3] if self._strided else around[:, 1:-1, :-3].contiguous()
        write(output)
        written = output.clone()
        output.fill_(float("nan"))
        assert around.isnan().all(), "wrote outside of its output"
        return written

    def attention(self, query: torch.Tensor, row: int) -> torch.Tensor:
        """Of the last tokens of a sequence, in float64."""
        return attention(query, self.pages.keys[row], self.pages.values[row], **self.params)
