"""Part 3: prefill of one layer with the heads of Llama 8B: a fresh prompt, and a chunk of one whose prefix is cached.

What counts as computed are the products of the tokens that see each other, and their FLOP/s stand beside those of one
large matrix product. torch's scaled_dot_product_attention gets the same keys and values without pages: contiguous, and
each KV head once for every query head of its group, so that all of torch's kernels can take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from figures import Figure, table
from torch.nn.attention.bias import causal_lower_right

from inferq.cuda.flash import PAGE_TOKENS, Flash, FlashParams, Prompts
from inferq.cuda.paged_prefill import paged_prefill
from inferq.engine.attention.triton import BLOCK_SIZE

from . import oracle
from .bandwidth import Pool
from .budget import TimeBudget
from .card import Card, Timing
from .shapes import ModelShape, prefill_flop

#: What has to be left for a case to begin, Triton's compiler included: a guess on the safe side.
CASE_SECONDS: Final = 3.0
REPEATS: Final = 10
#: Query tokens in a row that are compared with float64, at the beginning, in the middle and at the end.
CHECKED: Final = 4
#: The kernel that is not ours and not our binding's.
TORCH: Final = "torch sdpa"


class PrefillCase(NamedTuple):
    """The last `query_len` of `seq_len` tokens; the others are in the cache."""

    query_len: int
    seq_len: int

    def __str__(self) -> str:
        cached = self.seq_len - self.query_len
        return f"{self.query_len} onto {cached}" if cached else str(self.query_len)


CASES: Final = (PrefillCase(8192, 8192), PrefillCase(2048, 8192))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sequence in blocks of `key_cache` and `value_cache`, and the queries [query_len, heads, head_dim]."""

    case: PrefillCase
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    table: torch.Tensor  #: int64 [blocks]

    @classmethod
    def of(cls, case: PrefillCase, pool: Pool, block: int, shape: ModelShape) -> Prompt:
        key_cache, value_cache = pool.blocks(block)
        device = key_cache.device
        table = torch.randperm(len(key_cache), device=device)[: -(-case.seq_len // block)]
        query = torch.randn(case.query_len, shape.heads, shape.head_dim, device=device).to(key_cache.dtype)
        return cls(case, query, key_cache, value_cache, table)

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Its keys and values, [seq_len, kv_heads, head_dim]."""
        keys, values = (
            cache[self.table].transpose(1, 2).flatten(0, 1)[: self.case.seq_len]
            for cache in (self.key_cache, self.value_cache)
        )
        return keys, values

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As a step of one sequence: its block table, where its queries begin and end, its length."""
        query_starts, seq_lens = (
            torch.tensor(values, dtype=torch.int32, device=self.query.device)
            for values in ([0, self.case.query_len], [self.case.seq_len])
        )
        return self.table.to(torch.int32).unsqueeze(0), query_starts, seq_lens


class PrefillKernel(NamedTuple):
    """`prepare` makes the function that is timed: it returns [query_len, heads, head_dim]."""

    name: str
    block: int  #: tokens
    prepare: Callable[[Prompt], Callable[[], torch.Tensor]]


class MeasuredPrefill(NamedTuple):
    kernel: str
    case: PrefillCase
    seconds: Timing
    flop_per_s: float
    error: float  #: of the rows that were checked, relative to a row's norm
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound  # not so for NaN


def by_triton(prompt: Prompt) -> Callable[[], torch.Tensor]:
    block_tables, query_starts, seq_lens = prompt.arrays()
    output = torch.full_like(prompt.query, float("nan"))

    def run() -> torch.Tensor:
        paged_prefill(
            prompt.query,
            prompt.key_cache,
            prompt.value_cache,
            block_tables,
            query_starts,
            seq_lens,
            output,
            max_query_len=prompt.case.query_len,
            scale=prompt.scale,
            window=None,
            softcap=None,
            sinks=None,
        )
        return output

    return run


def by_flash(flash: Flash, prompt: Prompt) -> Callable[[], torch.Tensor]:
    prompts = Prompts(*prompt.arrays(), max_query_len=prompt.case.query_len, max_seq_len=prompt.case.seq_len)
    params = FlashParams(prompt.scale)
    return partial(flash.prefill, prompt.query, prompt.key_cache, prompt.value_cache, prompts, params)


def by_torch(prompt: Prompt) -> Callable[[], torch.Tensor]:
    query = prompt.query.transpose(0, 1).unsqueeze(0).contiguous()
    group = query.shape[1] // prompt.key_cache.shape[1]
    keys, values = (
        each.transpose(0, 1).repeat_interleave(group, dim=0).unsqueeze(0).contiguous() for each in prompt.contiguous()
    )
    mask = causal_lower_right(prompt.case.query_len, prompt.case.seq_len)

    def run() -> torch.Tensor:
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=prompt.scale)
        return output[0].transpose(0, 1)

    return run


def kernels(flash: Flash | None) -> list[PrefillKernel]:
    found = [PrefillKernel("triton", BLOCK_SIZE, by_triton)]
    if flash is not None:
        found.append(PrefillKernel(flash.name, PAGE_TOKENS, partial(by_flash, flash)))
    return [*found, PrefillKernel(TORCH, BLOCK_SIZE, by_torch)]


@torch.inference_mode()
def measure_prefill(
    kernel: PrefillKernel, shape: ModelShape, card: Card, pool: Pool, case: PrefillCase
) -> MeasuredPrefill:
    prompt = Prompt.of(case, pool, kernel.block, shape)
    run = kernel.prepare(prompt)
    seconds = card.time(run, REPEATS)
    rate = prefill_flop(shape, *case) / seconds.median
    return MeasuredPrefill(
        kernel.name, case, seconds, rate, sampled_error(prompt, run()), oracle.BOUNDS[prompt.query.dtype]
    )


def sampled_error(prompt: Prompt, output: torch.Tensor) -> float:
    """The largest of CHECKED rows at the beginning, in the middle and at the end."""
    keys, values = prompt.contiguous()
    last = max(0, prompt.case.query_len - CHECKED)
    options: dict[str, Any] = {"scale": prompt.scale, "window": None, "softcap": None, "sinks": None}
    errors = []
    for begin in (0, last // 2, last):
        end = min(begin + CHECKED, prompt.case.query_len)
        length = prompt.case.seq_len - prompt.case.query_len + end
        expected = oracle.attention(prompt.query[begin:end], keys[:length], values[:length], **options)
        errors.append(oracle.row_error(output[begin:end], expected))
    return max(errors)


def measure_all(
    found: Sequence[PrefillKernel],
    shape: ModelShape,
    card: Card,
    budget: TimeBudget,
    *,
    dtype: torch.dtype,
    cases: Sequence[PrefillCase],
) -> list[MeasuredPrefill]:
    largest = max(kernel.block for kernel in found)
    tokens = max(-(-case.seq_len // largest) for case in cases) * largest
    pool = Pool.of(tokens, shape, card.device, dtype)
    return [
        measure_prefill(kernel, shape, card, pool, case)
        for case in cases
        for kernel in found
        if budget.allows(f"prefill of {case}, {kernel.name}", CASE_SECONDS)
    ]


def as_keys(measured: Sequence[MeasuredPrefill], matrix_flop_per_s: float) -> dict[str, dict[str, dict[str, float]]]:
    """case: kernel: what was measured."""
    keys: dict[str, dict[str, dict[str, float]]] = {str(m.case): {} for m in measured}
    for m in measured:
        keys[str(m.case)][m.kernel] = {
            "ms": m.seconds.median * 1000,
            "tflop_s": m.flop_per_s / 1e12,
            "matrix_share": m.flop_per_s / matrix_flop_per_s,
        }
    return keys


def prefill_figures(measured: Sequence[MeasuredPrefill]) -> list[Figure]:
    return [Figure(f"prefill of {m.case}, {m.kernel}", m.flop_per_s / 1e12, "TFLOP/s", digits=0) for m in measured]


def prefill_table(measured: Sequence[MeasuredPrefill], matrix_flop_per_s: float) -> str:
    rows = [
        (
            m.kernel,
            m.case,
            f"{m.seconds.median * 1e3:.3f}",
            f"{m.seconds.low * 1e3:.3f} to {m.seconds.high * 1e3:.3f}",
            f"{m.flop_per_s / 1e12:.0f}",
            f"{m.flop_per_s / matrix_flop_per_s:.2f}",
            f"{m.error:.1e}",
        )
        for m in measured
    ]
    headings = ("kernel", "tokens", "ms a layer", "spread", "TFLOP/s", "of matrix product", "error")
    return table(headings, rows)
