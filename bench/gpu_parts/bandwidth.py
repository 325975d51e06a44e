"""Part 2: how near paged decode comes to the bandwidth of a plain copy, for batches and contexts of one layer.

What is read is K and V alone, once: a share near 1 means that nothing is read twice and nothing waits. Each launch of a
graph reads other blocks than the one before, so that what one leaves in the L2 is of no use to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from figures import Figure, table

from inferq.cuda.flash import PAGE_TOKENS, Flash, FlashParams
from inferq.cuda.paged_decode import DecodeWorkspace, num_splits, paged_decode
from inferq.engine.attention.triton import BLOCK_SIZE

from .budget import TimeBudget
from .card import Card, Timing
from .shapes import ModelShape, attention_bytes

BATCHES: Final = (1, 8, 64, 256)
CONTEXTS: Final = (512, 2048, 8192, 32768)
#: The longest context that the engine is taken to serve: the number of splits follows from it, `--quick` or not.
MAX_CONTEXT: Final = 32768
QUICK_BATCHES: Final = (1, 64)
QUICK_CONTEXTS: Final = (512, 2048, 8192)
#: The share that decode has to reach where there is enough to read: at this batch, from this context on.
BOUND: Final = 0.85
BOUND_BATCH: Final = 64
BOUND_CONTEXT: Final = 2048
#: What has to be left for a case to begin, Triton's compiler included: a guess on the safe side.
CASE_SECONDS: Final = 6.0
REPEATS: Final = 15
MAX_LAUNCHES: Final = 256
#: A graph reads this many times the L2 before it comes to the same blocks again.
L2_MULTIPLE: Final = 4
#: Of the free memory, what the caches may take.
MEMORY_SHARE: Final = 0.7

#: Attends with (query, key cache, value cache, block tables, lengths).
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


class DecodeKernel(NamedTuple):
    """A way to decode: `launch(rows)` gives the function for a batch of that many."""

    name: str
    block: int  #: tokens
    in_graph: bool
    launch: Callable[[int], Launch]


class Measured(NamedTuple):
    kernel: str
    batch: int
    context: int
    seconds: Timing  #: one layer's decode
    bytes_per_s: float


def triton_kernel(shape: ModelShape, card: Card, *, max_context: int, block: int = BLOCK_SIZE) -> DecodeKernel:
    def launch(rows: int) -> Launch:
        # Decided by the longest context that is served, as in the engine, and not by the one that is measured.
        splits = num_splits(rows, shape.kv_heads, multiprocessors=card.multiprocessors, max_context=max_context)
        workspace = DecodeWorkspace.allocate(rows, shape.heads, splits, shape.head_dim, card.device)

        def attend(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
        ) -> torch.Tensor:
            output = torch.empty_like(query)
            scale = shape.head_dim**-0.5
            paged_decode(
                query,
                keys,
                values,
                tables,
                lengths,
                output,
                scale=scale,
                window=None,
                softcap=None,
                sinks=None,
                splits=splits,
                workspace=workspace,
            )
            return output

        return attend

    return DecodeKernel("triton", block, True, launch)


def flash_kernel(flash: Flash, shape: ModelShape) -> DecodeKernel:
    params = FlashParams(scale=shape.head_dim**-0.5)

    def launch(rows: int) -> Launch:
        return partial(flash.decode, params=params)

    name = flash.name if flash.graph_safe else f"{flash.name}, no graph"
    return DecodeKernel(name, PAGE_TOKENS, flash.graph_safe, launch)


def kernels(shape: ModelShape, card: Card, flash: Flash | None, *, max_context: int) -> list[DecodeKernel]:
    """Those that there are here."""
    ours = triton_kernel(shape, card, max_context=max_context)
    return [ours] if flash is None else [ours, flash_kernel(flash, shape)]


@dataclass(frozen=True, slots=True)
class Pool:
    """Random keys and values of so many tokens of one layer, that each case sees as blocks of its own size."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Pool:
        keys, values = (
            torch.empty(tokens, shape.kv_heads, shape.head_dim, dtype=dtype, device=device).normal_() for _ in range(2)
        )
        return cls(keys, values)

    def __len__(self) -> int:
        return len(self.keys)

    def blocks(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [blocks, kv_heads, size, head_dim]."""
        heads, dim = self.keys.shape[1:]
        count = len(self) // size
        keys, values = (t[: count * size].view(count, heads, size, dim) for t in (self.keys, self.values))
        return keys, values


def make_pool(shape: ModelShape, card: Card, budget: TimeBudget, tokens: int, dtype: torch.dtype) -> Pool:
    """For `tokens`, or for as many as there is memory for."""
    fitting = int(card.free_bytes() * MEMORY_SHARE) // shape.layer_token_bytes
    if fitting < tokens:
        budget.skip(f"contexts of more than {fitting} tokens in all", "no memory for them")
    return Pool.of(min(fitting, tokens), shape, card.device, dtype)


def measure_decode(
    kernel: DecodeKernel, shape: ModelShape, card: Card, pool: Pool, *, batch: int, context: int
) -> Measured:
    """The time of one layer's decode; all layers of a run read other blocks, as far as the pool goes."""
    size = attention_bytes(shape, [context] * batch)
    keys, values = pool.blocks(kernel.block)
    width = -(-context // kernel.block)
    wanted = min(MAX_LAUNCHES, max(1, -(-L2_MULTIPLE * card.l2_bytes // size)))
    launches = min(wanted, len(keys) // (batch * width))
    order = torch.randperm(len(keys), device=card.device)[: launches * batch * width]
    tables = order.to(torch.int32).view(launches, batch, width)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=card.device)
    query = torch.randn(batch, shape.heads, shape.head_dim, device=card.device).to(keys.dtype)
    launch = kernel.launch(batch)

    def run() -> None:
        for each in tables:
            launch(query, keys, values, each, lengths)

    replay = card.recorder()(run) if kernel.in_graph else run
    seconds = card.time(replay, REPEATS).per(launches)
    return Measured(kernel.name, batch, context, seconds, size / seconds.median)


def measure_all(
    found: Sequence[DecodeKernel],
    shape: ModelShape,
    card: Card,
    budget: TimeBudget,
    *,
    dtype: torch.dtype,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> list[Measured]:
    """The cases with a bound come first, for there may not be time for all of them."""
    cases = sorted(
        ((batch, context) for batch in batches for context in contexts), key=lambda case: not has_bound(*case)
    )
    pool = make_pool(shape, card, budget, max(batches) * max(contexts), dtype)
    measured = []
    with torch.inference_mode():
        for batch, context in cases:
            if any(batch * -(-context // kernel.block) > len(pool) // kernel.block for kernel in found):
                budget.skip(f"decode {batch} x {context}", "does not fit into the device's memory")
                continue
            measured += [
                measure_decode(kernel, shape, card, pool, batch=batch, context=context)
                for kernel in found
                if budget.allows(f"decode {batch} x {context}, {kernel.name}", CASE_SECONDS)
            ]
    return sorted(measured, key=lambda m: (m.batch, m.context))


def has_bound(batch: int, context: int) -> bool:
    return batch == BOUND_BATCH and context >= BOUND_CONTEXT


def shares(measured: Sequence[Measured], copy_bytes_per_s: float, kernel: str = "triton") -> dict[str, float]:
    """`batch x context`: share of the copy's bandwidth."""
    return {f"{m.batch}x{m.context}": m.bytes_per_s / copy_bytes_per_s for m in measured if m.kernel == kernel}


def share_figures(measured: Sequence[Measured], copy_bytes_per_s: float) -> list[Figure]:
    """Those with a bound."""
    return [
        Figure(f"decode {m.batch} x {m.context}, of copy", m.bytes_per_s / copy_bytes_per_s, "", BOUND, at_least=True)
        for m in measured
        if m.kernel == "triton" and has_bound(m.batch, m.context)
    ]


def bandwidth_table(measured: Sequence[Measured], copy_bytes_per_s: float) -> str:
    rows = [
        (
            m.kernel,
            m.batch,
            m.context,
            f"{m.seconds.median * 1e6:.1f}",
            f"{m.seconds.low * 1e6:.1f} to {m.seconds.high * 1e6:.1f}",
            f"{m.bytes_per_s / 1e9:.0f}",
            f"{m.bytes_per_s / copy_bytes_per_s:.2f}",
        )
        for m in measured
    ]
    return table(("kernel", "batch", "context", "us a layer", "spread", "GB/s", "of copy"), rows)
