"""256 streams through Redis, and what the way through Redis costs the engine's throughput.

First the scripted engine, with 20 tokens a second for each stream: from the moment that the engine has made a token (it
notes the monotonic clock, which all processes of a machine share) to the reader that has it; and the worker's own CPU
for each token. Then the real engine: tokens a second through the queue against the same engine alone, in pairs that
alternate, with a core left to the queue and with every core the engine's. Budgets: p50 10 ms, p99 40 ms, 15 us; 0.97
and 0.90.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from engine_trace import prompt_key, read_trace
from figures import Figure, arguments, cannot_measure, figures_table, machine, percentile, report, require_quiet
from harness import scripted, worker
from prompts import chats

from inferq.engine import AsyncInferenceEngine, EngineConfig, SamplingParams
from inferq.producer import Delta, InferenceClient

STREAMS, STEP_MS = 256, 50
SECONDS, QUICK_SECONDS = 20.0, 2.0
PAIRS, QUICK_PAIRS = 7, 3
CONCURRENT, NEW_TOKENS, QUICK_NEW_TOKENS = 32, 64, 12
SCRIPTED, REAL = "scripted", "smol"

#: When the reader had each token of a prompt, by the prompt's key.
Arrivals = dict[int, list[float]]


async def read_stream(client: InferenceClient, prompt: str, arrived: Arrivals, running: asyncio.Barrier) -> None:
    """Read until cancelled; `running` is passed when every stream has its first token."""
    times = arrived[prompt_key(prompt)] = []
    request_id = await client.submit(prompt, sampling={"max_tokens": 20_000, "ignore_eos": True})
    waiting: asyncio.Task[int] | None = None
    async for event in client.stream(request_id):
        if isinstance(event, Delta):
            times += [time.monotonic()] * len(event.token_ids)
            waiting = waiting or asyncio.create_task(running.wait())


async def measure_latency(seconds: float) -> tuple[list[float], float]:
    """Milliseconds from engine to reader of each token, and microseconds of the worker's CPU for one.

    Of the time in which all streams run: it begins a second after the last one's first token.
    """
    with tempfile.TemporaryDirectory(prefix="inferq-trace-") as folder:
        path = Path(folder) / "engine.trace"
        engine = scripted("--step-ms", str(STEP_MS), "--trace", str(path))
        async with worker("--max-num-seqs", str(STREAMS), model=SCRIPTED, environment=engine) as running:
            process = psutil.Process(running.process.pid)
            arrived: Arrivals = {}
            async with InferenceClient.from_url(running.url, model=SCRIPTED) as client:
                all_run = asyncio.Barrier(STREAMS + 1)
                streams = [
                    asyncio.create_task(read_stream(client, f"stream {n}", arrived, all_run)) for n in range(STREAMS)
                ]
                await all_run.wait()
                await asyncio.sleep(1)
                before, begun_at = _cpu_seconds(process), time.monotonic()
                await asyncio.sleep(seconds)
                cpu_seconds, ended_at = _cpu_seconds(process) - before, time.monotonic()
                for stream in streams:
                    stream.cancel()
                await asyncio.wait(streams)
            if running.process.poll() is not None:
                cannot_measure("the worker ended during the run")
        made_at = read_trace(path).made_at
    found = [
        (at - made_at[key, index]) * 1000
        for key, times in arrived.items()
        for index, at in enumerate(times)
        if begun_at <= at < ended_at
    ]
    return found, cpu_seconds * 1e6 / len(found)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure_ratio(threads: int, pairs: int, new_tokens: int) -> list[float]:
    """Throughput through the queue over that of the engine alone, pair by pair; both are loaded all the time."""
    config = EngineConfig(model="demo", dtype="auto", threads=threads, max_num_seqs=CONCURRENT, max_model_len=2048)
    flags = ("--threads", str(threads), "--max-num-seqs", str(CONCURRENT), "--max-model-len", "2048")
    alone = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    queued = {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    async with (
        AsyncInferenceEngine(config) as engine,
        worker("--model", "demo", *flags, model=REAL) as running,
        InferenceClient.from_url(running.url, model=REAL) as client,
    ):

        async def by_engine(number: int) -> None:
            await engine.complete(messages=chats()[number], sampling=alone)

        async def by_queue(number: int) -> None:
            request_id = await client.submit(messages=chats()[number], sampling=queued)
            async for _ in client.stream(request_id):
                pass

        ratios = []
        await seconds_of(by_engine), await seconds_of(by_queue)
        for pair in range(pairs):
            ways = (by_engine, by_queue) if pair % 2 else (by_queue, by_engine)
            taken = {way: await seconds_of(way) for way in ways}
            ratios.append(taken[by_engine] / taken[by_queue])
        return ratios


async def seconds_of(way: Callable[[int], Awaitable[None]]) -> float:
    begun = time.perf_counter()
    await asyncio.gather(*(way(number) for number in range(CONCURRENT)))
    return time.perf_counter() - begun


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    seconds, pairs, new_tokens = (
        (QUICK_SECONDS, QUICK_PAIRS, QUICK_NEW_TOKENS) if args.quick else (SECONDS, PAIRS, NEW_TOKENS)
    )
    cores = os.cpu_count() or 1
    print(machine())
    latencies, us_per_token = await measure_latency(seconds)
    free = await measure_ratio(max(1, cores - 1), pairs, new_tokens)
    full = await measure_ratio(cores, pairs, new_tokens)
    p50, p99 = statistics.median(latencies), percentile(latencies, 99)
    ratio, ratio_all = statistics.median(free), statistics.median(full)
    print(f"{STREAMS} streams for {seconds:g} s, steps of {STEP_MS} ms; pairs: {pairs}, {CONCURRENT} chats at once")
    rate = len(latencies) / seconds / STREAMS
    figures = [
        Figure("tokens a second, each stream", rate, digits=1),
        Figure(f"engine to reader, p50 of {len(latencies)}", p50, "ms", 10, digits=1),
        Figure(f"engine to reader, p99 of {len(latencies)}", p99, "ms", 40, digits=1),
        Figure("worker CPU for a token", us_per_token, "us", 15, digits=1),
        Figure(
            f"through Redis / engine alone, a core free ({_spread(free)})", ratio, "", 0.97, at_least=True, digits=3
        ),
        Figure(
            f"through Redis / engine alone, all cores ({_spread(full)})", ratio_all, "", 0.9, at_least=True, digits=3
        ),
    ]
    print(figures_table(figures))
    report(
        args,
        {
            "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2),
            "worker_us_per_token": round(us_per_token, 2),
            "ratio": round(ratio, 3),
            "ratio_all_cores": round(ratio_all, 3),
            "stream_tok_s": round(rate, 2),
            "samples": len(latencies),
            "pairs": pairs,
        },
        figures,
    )


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def main() -> None:
    asyncio.run(run(arguments(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
