"""From `submit` to claim on an idle worker, and what an idle worker costs.

The scripted engine stands in for the model. Both ends of a pickup are stamped by the server itself: the epoch of the
`queued` entry is its time at enqueue in microseconds, that of `started` its time at claim. Budget: p50 5 ms, p99
20 ms; idle under 1% of a core and under 5 round trips a second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import psutil
import redis.asyncio
from figures import Figure, arguments, cannot_measure, figures_table, machine, percentile, report, require_quiet
from harness import Worker, scripted, worker

from inferq.producer import InferenceClient
from inferq.producer.contract import Keys

SAMPLES, QUICK_SAMPLES = 1000, 300
IDLE_SECONDS, QUICK_IDLE_SECONDS = 20.0, 8.0
MODEL = "scripted"


async def pickup_ms(client: InferenceClient, connection: redis.asyncio.Redis, number: int) -> float:
    """Milliseconds between the server's own stamps of `queued` and `started` of one request."""
    request_id = await client.submit("hello", sampling={"max_tokens": 1}, request_id=f"pickup-{number}")
    await client.result(request_id)
    entries = await connection.xrange(Keys(MODEL).events(request_id), count=2)
    queued, started = (int(entry_id.split(b"-")[0]) for entry_id, _ in entries)
    return (started - queued) / 1000


async def measure_pickup(running: Worker, samples: int, pause: float) -> list[float]:
    random_pause = random.Random(7)
    async with (
        InferenceClient.from_url(running.url, model=MODEL) as client,
        redis.asyncio.Redis.from_url(running.url) as connection,
    ):
        await pickup_ms(client, connection, -1)
        found = []
        for number in range(samples):
            await asyncio.sleep(random_pause.uniform(pause / 2, pause * 1.5))
            found.append(await pickup_ms(client, connection, number))
        return found


async def idle_round_trips(running: Worker, seconds: float) -> float:
    """Commands a second that clients send while nothing happens; what scripts call inside is not a round trip."""
    async with redis.asyncio.Redis.from_url(running.url) as connection:
        commands = 0
        async with connection.monitor() as monitor:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                try:
                    command = await asyncio.wait_for(monitor.next_command(), left)
                except TimeoutError:
                    break
                commands += command["client_type"] != "lua"
        return commands / seconds


def idle_cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    samples, idle, pause = (QUICK_SAMPLES, QUICK_IDLE_SECONDS, 0.06) if args.quick else (SAMPLES, IDLE_SECONDS, 0.1)
    print(machine())
    async with worker(model=MODEL, environment=scripted("--step-ms", "1")) as running:
        found = await measure_pickup(running, samples, pause)
        process = psutil.Process(running.process.pid)
        before, start = idle_cpu_seconds(process), time.monotonic()
        await asyncio.sleep(idle)
        cpu_percent = 100 * (idle_cpu_seconds(process) - before) / (time.monotonic() - start)
        round_trips = await idle_round_trips(running, idle)
        if running.process.poll() is not None:
            cannot_measure("the worker ended during the run")
    p50, p99 = statistics.median(found), percentile(found, 99)
    figures = [
        Figure(f"submit to claim, p50 of {samples}", p50, "ms", 5),
        Figure(f"submit to claim, p99 of {samples}", p99, "ms", 20),
        Figure("idle worker, of a core", cpu_percent, "%", 1),
        Figure("idle worker, round trips", round_trips, "/s", 5),
    ]
    print(figures_table(figures))
    report(
        args,
        {
            "p50_ms": round(p50, 3),
            "p99_ms": round(p99, 3),
            "idle_cpu_percent": round(cpu_percent, 3),
            "idle_round_trips_s": round(round_trips, 2),
            "samples": samples,
        },
        figures,
    )


def main() -> None:
    asyncio.run(run(arguments(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
