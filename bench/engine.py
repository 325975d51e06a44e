"""The engine alone: output tokens a second at 1, 8, 32 and 64 concurrent requests, step time, time to first token.

64 fixed prompts of 43 tokens on average (`prompts.py`), 128 new tokens each, greedy, `ignore_eos`. No Redis.
`--quick` asks for fewer requests at each concurrency and for 32 new tokens, and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import dataclass

from figures import arguments, machine, report, require_quiet, table
from prompts import chats

from inferq.engine import AsyncInferenceEngine, EngineConfig, SamplingParams

CONCURRENCIES = (1, 8, 32, 64)
NEW_TOKENS = 128
#: How many requests a concurrency gets: every slot full, and no run under some seconds.
REQUESTS = {1: 4, 8: 16, 32: 64, 64: 64}
QUICK_NEW_TOKENS = 32
QUICK_REQUESTS = {1: 1, 8: 8, 32: 32, 64: 64}


@dataclass(frozen=True)
class Figures:
    tokens_per_second: float
    step_ms: float
    ttft_ms: float


async def measure(engine: AsyncInferenceEngine, concurrency: int, requests: int, new_tokens: int) -> Figures:
    """Keep `concurrency` requests running until `requests` have ended."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    messages = chats()
    waiting = list(range(requests))
    first_token_ms: list[float] = []

    async def client() -> None:
        while waiting:
            number = waiting.pop()
            sent = time.perf_counter()
            first = True
            async for _ in engine.generate(messages=messages[number % len(messages)], sampling=sampling):
                if first:
                    first_token_ms.append((time.perf_counter() - sent) * 1000)
                    first = False

    steps_before = engine.stats.step if engine.stats else 0
    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    steps = (engine.stats.step if engine.stats else 0) - steps_before
    return Figures(requests * new_tokens / seconds, seconds * 1000 / steps, statistics.median(first_token_ms))


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    config = EngineConfig(model=args.model, dtype=args.dtype, threads=args.threads, max_num_seqs=max(CONCURRENCIES))
    engine = AsyncInferenceEngine(config)
    facts = await engine.start_engine_loop()
    new_tokens, requests = (QUICK_NEW_TOKENS, QUICK_REQUESTS) if args.quick else (NEW_TOKENS, REQUESTS)
    mean = statistics.mean(len(engine.text.encode_chat(chat)) for chat in chats())
    print(f"{facts.model} in {facts.dtype} on {facts.device}, attention {facts.attention}; {machine()}")
    print(f"prompts of {mean:.0f} tokens on average, {new_tokens} new tokens each, greedy, ignore_eos")
    try:
        await measure(engine, 1, 1, 8)
        results = {c: await measure(engine, c, requests[c], new_tokens) for c in CONCURRENCIES}
    finally:
        await engine.stop()
    rows = [
        (c, f"{f.tokens_per_second:.0f}", f"{f.step_ms:.1f}", f"{f.ttft_ms:.0f}", requests[c])
        for c, f in results.items()
    ]
    print(table(("concurrent", "tokens/s", "step ms", "median TTFT ms", "requests"), rows))
    report(
        args,
        {
            "tok_s": {str(c): round(f.tokens_per_second, 1) for c, f in results.items()},
            "step_ms": {str(c): round(f.step_ms, 2) for c, f in results.items()},
            "ttft_ms": {str(c): round(f.ttft_ms, 1) for c, f in results.items()},
            "new_tokens": new_tokens,
            "dtype": facts.dtype,
        },
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: every core")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
