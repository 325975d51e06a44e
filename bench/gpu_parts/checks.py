"""Part 1, what its checks share: data that is drawn anew in each run, a paged cache around it, and the verdict.

Outputs are poisoned, unused slots and rows hold NaN, and block tables are shuffled, so that what is not written, or is
read though it must not be, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

NAN = float("nan")


class Case(NamedTuple):
    """One comparison that is still to be made.

    `run` returns how far off the kernel is: relative to a row's norm, or a count, or a share of rows. `bound` None is
    that of the dtype.
    """

    kernel: str
    case: str
    run: Callable[[Draw], float]
    bound: float | None = None


class Check(NamedTuple):
    """One that was made."""

    kernel: str
    case: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound  # not so for NaN


@dataclass(frozen=True, slots=True)
class Draw:
    """Where numbers come from: a device, a dtype, and a seed of this run."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, seed: int) -> Draw:
        return cls(device, dtype, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.randn(*shape, device=self.device, generator=self.generator)
        return numbers.to(self.dtype if dtype is None else dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """float32."""
        return torch.rand(*shape, device=self.device, generator=self.generator) * (high - low) + low

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64, from 0 to high - 1."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def shuffled(self, count: int) -> torch.Tensor:
        """int64 [count], a permutation."""
        return torch.randperm(count, device=self.device, generator=self.generator)

    def poisoned(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=self.dtype, device=self.device)

    def lengths(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def starts_of(chunks: Sequence[tuple[int, int]]) -> list[int]:
    """Where the query tokens of each (query tokens, all tokens) begin, and where the last ones end."""
    return [0, *accumulate(tokens for tokens, _ in chunks)]


class PagedCache:
    """Keys and values of some sequences in shuffled blocks. Whatever is no token of theirs is NaN."""

    def __init__(
        self, draw: Draw, contexts: Sequence[int], *, kv_heads: int, key_dim: int, value_dim: int, block: int
    ) -> None:
        counts = [-(-context // block) for context in contexts]
        blocks = sum(counts) + 1  # one that nobody owns: what pads the tables
        order = draw.shuffled(blocks).tolist()
        spare = order.pop()
        self.key = draw.poisoned(blocks, kv_heads, block, key_dim)
        self.value = draw.poisoned(blocks, kv_heads, block, value_dim)
        self.tables = torch.full((len(contexts), max(counts) + 1), spare, dtype=torch.int32, device=draw.device)
        #: For each sequence [context, kv_heads, dim].
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            table = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64, device=draw.device)
            self.tables[row, :count] = table
            position = torch.arange(context, device=draw.device)
            places = table[position // block], position % block
            for pages, entries, dim in ((self.key, self.keys, key_dim), (self.value, self.values, value_dim)):
                entries.append(draw.normal(context, kv_heads, dim))
                pages[places[0], :, places[1]] = entries[-1]
