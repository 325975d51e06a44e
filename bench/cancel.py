"""From `cancel()` to KV blocks that are free, and to the terminal event at the reader, while 16 requests run.

The scripted engine stands in for the model, with steps of 20 ms. It notes by the monotonic clock, which all processes
of a machine share, when it has taken a request's blocks back. Budget: one step and 10 ms, p99.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine_trace import prompt_key, read_trace, step_ms
from figures import Figure, arguments, cannot_measure, figures_table, machine, percentile, report, require_quiet
from harness import scripted, worker

from inferq.producer import Delta, Finished, InferenceClient

SAMPLES, QUICK_SAMPLES = 1000, 300
STEP_MS = 20
RUNNING = 16
MODEL = "scripted"
BUDGET_MS = 10


@dataclass
class Cancelled:
    prompt: str
    asked_at: float
    ended_at: float


async def cancel_one(client: InferenceClient, number: int, pause: float) -> Cancelled:
    """Cancel a request some time after its first token."""
    prompt = f"request {number}"
    request_id = await client.submit(prompt, sampling={"max_tokens": 20_000, "ignore_eos": True})
    asked_at = 0.0
    async for event in client.stream(request_id):
        match event:
            case Delta() if not asked_at:
                await asyncio.sleep(pause)
                asked_at = time.monotonic()
                await client.cancel(request_id)
            case Finished():
                return Cancelled(prompt, asked_at, time.monotonic())
            case _:
                pass
    raise AssertionError("a stream ends with its terminal event")


async def measure(url: str, samples: int) -> list[Cancelled]:
    """Always so many run; whenever one was cancelled, the next begins."""
    pauses = random.Random(7)
    numbers = iter(range(samples))
    found: list[Cancelled] = []

    async def keep_one_running(client: InferenceClient) -> None:
        found.extend([await cancel_one(client, number, pauses.uniform(0.1, 0.5)) for number in numbers])

    async with InferenceClient.from_url(url, model=MODEL) as client:
        await asyncio.gather(*(keep_one_running(client) for _ in range(RUNNING)))
    return found


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    samples = QUICK_SAMPLES if args.quick else SAMPLES
    print(machine())
    with tempfile.TemporaryDirectory(prefix="inferq-trace-") as folder:
        path = Path(folder) / "engine.trace"
        engine = scripted("--step-ms", str(STEP_MS), "--trace", str(path))
        async with worker("--max-num-seqs", "64", model=MODEL, environment=engine) as running:
            found = await measure(running.url, samples)
            if running.process.poll() is not None:
                cannot_measure("the worker ended during the run")
        trace = read_trace(path)
    freed = [(trace.freed_at[prompt_key(each.prompt)] - each.asked_at) * 1000 for each in found]
    terminal = [(each.ended_at - each.asked_at) * 1000 for each in found]
    step = percentile(step_ms(trace), 99)
    freed_p99, terminal_p99 = percentile(freed, 99), percentile(terminal, 99)
    print(f"{samples} cancellations, {RUNNING} requests running, steps of {STEP_MS} ms")
    figures = [
        Figure("cancel() to blocks free, p50", statistics.median(freed), "ms", digits=1),
        Figure("cancel() to blocks free, p99", freed_p99, "ms", step + BUDGET_MS, digits=1),
        Figure("a step, p99", step, "ms", digits=1),
        Figure("cancel() to terminal event, p50", statistics.median(terminal), "ms", digits=1),
        Figure("cancel() to terminal event, p99", terminal_p99, "ms", digits=1),
    ]
    print(figures_table(figures))
    report(
        args,
        {
            "freed_p50_ms": round(statistics.median(freed), 2),
            "freed_p99_ms": round(freed_p99, 2),
            "step_ms": round(step, 2),
            "terminal_p50_ms": round(statistics.median(terminal), 2),
            "terminal_p99_ms": round(terminal_p99, 2),
            "samples": samples,
        },
        figures,
    )


def main() -> None:
    asyncio.run(run(arguments(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
