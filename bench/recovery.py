"""`kill -9` of a worker with 16 streams running and a second worker alive: the longest pause that a reader sees.

The real model in fp32, so that texts can be compared with those of a run that nobody disturbed; with and without 500
short jobs that wait. Budget: the lease and one second.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from harness import Worker, arguments, cannot_measure, machine, report, require_quiet, server, table, worker
from prompts import chats

from inferq.producer import Delta, InferenceClient, Started

STREAMS, WAITING = 16, 500
LEASE_SECONDS, QUICK_LEASE_SECONDS = 5.0, 2.0
RUNS = 5
NEW_TOKENS = 48
MODEL = "smol"
BUDGET_SECONDS = 1.0


@dataclass
class Stream:
    """What a reader has got, and the longest time that it waited for the next token after its first."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    longest: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    a_third: asyncio.Event = field(default_factory=asyncio.Event)  #: of its tokens are there
    _last: float | None = None

    async def read(self, client: InferenceClient) -> None:
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        request_id = await client.submit(messages=chats()[self.number], sampling=sampling)
        async for event in client.stream(request_id):
            if isinstance(event, Started):
                self.started.set()
            elif isinstance(event, Delta) and event.token_ids:
                now = time.monotonic()
                if self._last is not None:
                    self.longest = max(self.longest, now - self._last)
                self._last = now
                self.token_ids += event.token_ids
                if len(self.token_ids) >= NEW_TOKENS // 3:
                    self.a_third.set()


async def start_streams(client: InferenceClient) -> tuple[list[Stream], list[asyncio.Task[None]]]:
    streams = [Stream(number) for number in range(STREAMS)]
    return streams, [asyncio.create_task(stream.read(client)) for stream in streams]


async def undisturbed(client: InferenceClient) -> list[list[int]]:
    streams, tasks = await start_streams(client)
    await asyncio.gather(*tasks)
    return [stream.token_ids for stream in streams]


async def disturbed(client: InferenceClient, victim: Worker, heir: Worker, num_waiting: int) -> list[Stream]:
    """All streams run at the victim when it is killed; `heir` is alive, and was kept from claiming until then."""
    heir.process.send_signal(signal.SIGSTOP)
    try:
        streams, tasks = await start_streams(client)
        await asyncio.gather(*(stream.started.wait() for stream in streams))
    finally:
        heir.process.send_signal(signal.SIGCONT)
    short = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    ids = [await client.submit(f"Number {number} is", sampling=short) for number in range(num_waiting)]
    await asyncio.gather(*(stream.a_third.wait() for stream in streams))
    victim.process.kill()
    await asyncio.gather(*tasks)
    for request_id in ids:
        await client.result(request_id)
    return streams


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    lease, runs = (QUICK_LEASE_SECONDS, 1) if args.quick else (LEASE_SECONDS, RUNS)
    flags = ("--model", "demo", "--dtype", "float32", "--lease-seconds", str(lease), "--max-num-seqs", str(STREAMS))
    flags += ("--max-model-len", "2048")
    print(machine())
    longest: dict[int, list[float]] = {0: [], WAITING: []}
    token_exact = True
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(server())
        client = await stack.enter_async_context(InferenceClient.from_url(url, model=MODEL))

        async def new_worker() -> Worker:
            return await stack.enter_async_context(worker(*flags, model=MODEL, url=url))

        victim = await new_worker()
        right = await undisturbed(client)
        for num_waiting in [0, WAITING] * runs:
            heir = await new_worker()
            await asyncio.sleep(lease)  # one that has just begun takes over nothing for a lease
            streams = await disturbed(client, victim, heir, num_waiting)
            longest[num_waiting].append(max(stream.longest for stream in streams))
            token_exact = token_exact and [stream.token_ids for stream in streams] == right
            if heir.process.poll() is not None:
                cannot_measure("the second worker ended during the run")
            victim = heir
    print(f"{runs} run(s) each way, {STREAMS} streams of {NEW_TOKENS} tokens, fp32, lease {lease:g} s")
    print(table(("short jobs waiting", "longest pause, s", "median, s", "budget, s"), _rows(longest, lease)))
    print(f"every text equal to the undisturbed run: {'yes' if token_exact else 'NO'}")
    report(
        args,
        {
            "max_s": round(max(longest[0] + longest[WAITING]), 3),
            "max_s_by_waiting": {str(waiting): round(max(found), 3) for waiting, found in longest.items()},
            "lease_s": lease,
            "token_exact": token_exact,
            "runs": 2 * runs,
        },
    )


def _rows(longest: dict[int, list[float]], lease: float) -> Sequence[tuple[object, ...]]:
    budget = f"{lease + BUDGET_SECONDS:.1f}"
    return [(n, f"{max(found):.2f}", f"{statistics.median(found):.2f}", budget) for n, found in longest.items()]


def main() -> None:
    asyncio.run(run(arguments(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
