"""More workers, more work done: 1, 2, 4 and 8 workers against one, and eight of them against the ideal makespan.

The scripted engine stands in for the model: a worker has 16 slots, and a request of 40 tokens takes it 2 s, so that
nobody computes and what is seen is the queue's own. Budget: within 10 % of the ideal.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections import Counter
from contextlib import AsyncExitStack

from figures import Figure, arguments, cannot_measure, figures_table, machine, report, require_quiet, table
from harness import scripted, server, worker

from inferq.producer import InferenceClient, Started

FLEETS = (1, 2, 4, 8)
SLOTS = 16
TOKENS, STEP_MS = 40, 50
JOB_SECONDS = TOKENS * STEP_MS / 1000
JOBS = 240
MODEL = "scripted"
LEAST_EFFICIENCY, MOST_MAKESPAN = 0.9, 1.1


async def makespan(client: InferenceClient, num_jobs: int) -> tuple[float, Counter[str]]:
    """Seconds from the first submission to the last end, and how many jobs each worker had."""

    async def one(number: int) -> str:
        request_id = await client.submit(f"job {number}", sampling={"max_tokens": TOKENS, "ignore_eos": True})
        by = ""
        async for event in client.stream(request_id):
            if isinstance(event, Started):
                by = event.worker
        return by

    begun = time.perf_counter()
    workers = await asyncio.gather(*(one(number) for number in range(num_jobs)))
    return time.perf_counter() - begun, Counter(workers)


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    waves = 1 if args.quick else 3
    print(machine())
    engine = scripted("--step-ms", str(STEP_MS))
    spans: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(server())
        client = await stack.enter_async_context(InferenceClient.from_url(url, model=MODEL))
        workers = []
        for size in FLEETS:
            while len(workers) < size:
                started = worker("--max-num-seqs", str(SLOTS), model=MODEL, environment=engine, url=url)
                workers.append(await stack.enter_async_context(started))
            spans[size], _ = await makespan(client, size * SLOTS * waves)
        total, by_worker = await makespan(client, JOBS)
        if any(each.process.poll() is not None for each in workers):
            cannot_measure("a worker ended during the run")
    ideal = math.ceil(JOBS / (FLEETS[-1] * SLOTS)) * JOB_SECONDS
    efficiency = {size: spans[1] / spans[size] for size in FLEETS}
    print(f"{waves} job(s) a slot, {SLOTS} slots a worker, {JOB_SECONDS:g} s a job")
    rows = [(size, f"{size * SLOTS * waves / spans[size]:.1f}", f"{spans[size]:.2f}") for size in FLEETS]
    print(table(("workers", "jobs/s", "seconds"), rows))
    jobs_of_a_worker = sorted([*by_worker.values(), *[0] * (FLEETS[-1] - len(by_worker))])
    figures = [
        *(
            Figure(f"{size} workers, of linear", efficiency[size], "", LEAST_EFFICIENCY, at_least=True, digits=3)
            for size in FLEETS[1:]
        ),
        Figure(f"{JOBS} jobs on {FLEETS[-1]} workers, of ideal", total / ideal, "", MOST_MAKESPAN, digits=3),
        Figure("of these, jobs of the least loaded worker", jobs_of_a_worker[0], digits=0),
        Figure("of these, jobs of the most loaded worker", jobs_of_a_worker[-1], digits=0),
    ]
    print(figures_table(figures))
    report(
        args,
        {
            "efficiency": {str(size): round(efficiency[size], 3) for size in FLEETS[1:]},
            "makespan_ratio": round(total / ideal, 3),
            "jobs_of_a_worker": jobs_of_a_worker,
        },
        figures,
    )


def main() -> None:
    asyncio.run(run(arguments(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
