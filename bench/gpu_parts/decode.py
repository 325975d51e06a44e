"""Part 4: decode steps of the whole engine on a random model, beside the least that its bytes and operations take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from figures import table

from inferq.engine.runner import ModelRunner

from .budget import TimeBudget
from .engine import Generated, fits, generate
from .model import random_prompts
from .shapes import ModelShape, roofline_seconds

#: 64 first: it has bounds, and there may not be time for all.
BATCHES: Final = (64, 1, 256)
QUICK_BATCHES: Final = (64, 1)
PROMPT_TOKENS: Final = 1024
NEW_TOKENS: Final = 128
#: Shares of the matrix rate and of the roofline, from which the time that a batch will take is guessed.
_PREFILL_SHARE: Final = 0.25
_DECODE_SHARE: Final = 0.25


class Ceilings(NamedTuple):
    """What was measured of the device: bytes a second of a copy, FLOP/s of a matrix product."""

    bytes_per_s: float
    flop_per_s: float


class DecodeResult(NamedTuple):
    batch: int
    context: float  #: tokens, of the mean step and sequence
    steps: int
    step_seconds: float  #: median
    low: float
    high: float
    roofline_seconds: float
    prefill_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_seconds

    @property
    def share(self) -> float:
        return self.roofline_seconds / self.step_seconds


def measure_batches(
    runner: ModelRunner,
    shape: ModelShape,
    ceilings: Ceilings,
    budget: TimeBudget,
    *,
    batches: Sequence[int],
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    seed: int,
) -> list[DecodeResult]:
    results = []
    for batch in batches:
        what = f"{batch} sequences of {prompt_tokens} tokens"
        if not fits(runner, rows=batch, context=prompt_tokens + new_tokens):
            budget.skip(what, "the KV cache is too small")
            continue
        if budget.allows(what, _estimate(shape, ceilings, batch, prompt_tokens, new_tokens)):
            prompts = random_prompts(batch, prompt_tokens, shape.vocabulary, seed=seed)
            results.append(summary(generate(runner, prompts, new_tokens), shape, ceilings))
    return sorted(results, key=lambda result: result.batch)


def _estimate(shape: ModelShape, ceilings: Ceilings, batch: int, prompt_tokens: int, new_tokens: int) -> float:
    prefill = 2 * shape.step_parameters * batch * prompt_tokens / (ceilings.flop_per_s * _PREFILL_SHARE)
    step = roofline_seconds(shape, [prompt_tokens] * batch, **ceilings._asdict())
    return prefill + new_tokens * step / _DECODE_SHARE + 2


def summary(run: Generated, shape: ModelShape, ceilings: Ceilings) -> DecodeResult:
    steps = run.decode_steps()
    seconds = [each for each, _ in steps]
    floors = [roofline_seconds(shape, contexts, **ceilings._asdict()) for _, contexts in steps]
    batch = len(run.tokens)
    return DecodeResult(
        batch=batch,
        context=statistics.fmean(statistics.fmean(contexts) for _, contexts in steps),
        steps=len(steps),
        step_seconds=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        roofline_seconds=statistics.median(floors),
        prefill_tokens_per_s=batch * run.prompt_tokens / run.first_token_seconds,
    )


def as_keys(result: DecodeResult) -> dict[str, float]:
    return {
        "step_ms": result.step_seconds * 1000,
        "tok_s": result.tokens_per_s,
        "roofline_share": result.share,
        "prefill_tok_s": result.prefill_tokens_per_s,
    }


def decode_table(results: Sequence[DecodeResult]) -> str:
    rows = [
        (
            r.batch,
            f"{r.context:.0f}",
            r.steps,
            f"{r.step_seconds * 1000:.2f}",
            f"{r.low * 1000:.2f} to {r.high * 1000:.2f}",
            f"{r.roofline_seconds * 1000:.2f}",
            f"{r.tokens_per_s:.0f}",
            f"{r.share:.2f}",
            f"{r.prefill_tokens_per_s:.0f}",
        )
        for r in results
    ]
    headings = (
        "batch",
        "context",
        "steps",
        "step ms",
        "spread",
        "roofline ms",
        "tokens/s",
        "share",
        "prefill tokens/s",
    )
    return table(headings, rows)
