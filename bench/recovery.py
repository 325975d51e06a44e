"""A worker is lost with 16 streams running and a second worker alive: the longest pause that a reader sees.

The real model in fp32, so that texts can be compared with those of a run that nobody disturbed. The worker is killed
(`kill -9`), with and without 500 short jobs that wait; without `--quick` it is also stopped (SIGSTOP), and its engine's
process alone is killed. Budget: the lease and one second. Of the pause the second worker takes a part to prefill what
the streams hold, all 16 at once: when it had them is a figure of its own, and so is the same work undisturbed, from
claim to first token. Prompts are short, since it is the queue that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import psutil
from figures import Figure, arguments, cannot_measure, figures_table, machine, report, require_quiet
from harness import Worker, server, worker

from inferq.producer import Delta, InferenceClient, Started

STREAMS, WAITING = 16, 500
LEASE_SECONDS, QUICK_LEASE_SECONDS = 5.0, 2.0
RUNS = 3
NEW_TOKENS = 48
MODEL = "smol"
BUDGET_SECONDS = 1.0


@dataclass
class Stream:
    """What a reader has got, and the longest time that it waited for the next token after its first."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    longest: float = 0.0
    started_at: list[float] = field(default_factory=list)  #: by the monotonic clock, one for each owner
    first_token_at: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    a_third: asyncio.Event = field(default_factory=asyncio.Event)  #: of its tokens are there
    _last: float | None = None

    async def read(self, client: InferenceClient) -> None:
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        request_id = await client.submit(f"Number {self.number} is", sampling=sampling)
        async for event in client.stream(request_id):
            if isinstance(event, Started):
                self.started_at.append(time.monotonic())
                self.started.set()
            elif isinstance(event, Delta) and event.token_ids:
                now = time.monotonic()
                self.first_token_at = self.first_token_at or now
                if self._last is not None:
                    self.longest = max(self.longest, now - self._last)
                self._last = now
                self.token_ids += event.token_ids
                if len(self.token_ids) >= NEW_TOKENS // 3:
                    self.a_third.set()


async def start_streams(client: InferenceClient) -> tuple[list[Stream], list[asyncio.Task[None]]]:
    streams = [Stream(number) for number in range(STREAMS)]
    return streams, [asyncio.create_task(stream.read(client)) for stream in streams]


async def undisturbed(client: InferenceClient) -> list[Stream]:
    streams, tasks = await start_streams(client)
    await asyncio.gather(*tasks)
    return streams


def kill(victim: Worker) -> None:
    victim.process.kill()


def stop(victim: Worker) -> None:
    victim.process.send_signal(signal.SIGSTOP)


def kill_engine(victim: Worker) -> None:
    engines = [each for each in psutil.Process(victim.process.pid).children() if "--fd" in each.cmdline()]
    if len(engines) != 1:
        cannot_measure(f"the worker has {len(engines)} processes that look like its engine")
    engines[0].kill()


@dataclass
class Way:
    """One way to lose a worker, and what its runs have shown, in seconds."""

    name: str
    harm: Callable[[Worker], None]
    num_waiting: int = 0
    pauses: list[float] = field(default_factory=list)  #: the longest of each run
    taken_over: list[float] = field(default_factory=list)  #: the last stream of each run, from the harm on

    def figures(self, lease: float) -> list[Figure]:
        # How long an engine takes to load its model again is nothing that a lease bounds.
        # Nor is when a slot comes free, where other jobs have them all.
        budget = None if self.harm is kill_engine or self.num_waiting else lease + BUDGET_SECONDS
        claims = [Figure(f"{self.name}: until taken over", max(self.taken_over), "s")] if self.taken_over else []
        return [
            *claims,
            Figure(f"{self.name}: longest pause", max(self.pauses), "s", budget),
            Figure(f"{self.name}: median of the longest pauses", statistics.median(self.pauses), "s"),
        ]


def ways(quick: bool) -> list[Way]:
    killed = [Way("worker killed", kill), Way(f"worker killed, {WAITING} jobs wait", kill, WAITING)]
    return killed if quick else [*killed, Way("worker stopped", stop), Way("engine killed", kill_engine)]


async def disturbed(client: InferenceClient, victim: Worker, heir: Worker, way: Way) -> list[Stream]:
    """All streams run at the victim when it is harmed; `heir` is alive, and was kept from claiming until then."""
    heir.process.send_signal(signal.SIGSTOP)
    try:
        streams, tasks = await start_streams(client)
        await asyncio.gather(*(stream.started.wait() for stream in streams))
    finally:
        heir.process.send_signal(signal.SIGCONT)
    short = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    ids = [await client.submit(f"Number {number} is", sampling=short) for number in range(way.num_waiting)]
    await asyncio.gather(*(stream.a_third.wait() for stream in streams))
    harmed_at = time.monotonic()
    way.harm(victim)
    await asyncio.gather(*tasks)
    victim.process.kill()  # one that still lives would share the next run's streams
    for request_id in ids:
        await client.cancel(request_id)
    way.pauses.append(max(stream.longest for stream in streams))
    if way.harm is not kill_engine:
        way.taken_over.append(max(stream.started_at[-1] for stream in streams) - harmed_at)
    return streams


async def run(args: argparse.Namespace) -> None:
    require_quiet(args)
    lease, runs = (QUICK_LEASE_SECONDS, 1) if args.quick else (LEASE_SECONDS, RUNS)
    flags = ("--model", "demo", "--dtype", "float32", "--lease-seconds", str(lease), "--max-num-seqs", str(STREAMS))
    flags += ("--max-model-len", "2048")
    print(machine())
    tried = ways(args.quick)
    token_exact = True
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(server())
        client = await stack.enter_async_context(InferenceClient.from_url(url, model=MODEL))

        async def new_worker() -> Worker:
            return await stack.enter_async_context(worker(*flags, model=MODEL, url=url))

        victim = await new_worker()
        right = await undisturbed(client)
        prefill = max(stream.first_token_at - stream.started_at[0] for stream in right)
        for way in tried * runs:
            heir = await new_worker()
            await asyncio.sleep(lease)  # one that has just begun takes over nothing for a lease
            streams = await disturbed(client, victim, heir, way)
            token_exact = token_exact and [each.token_ids for each in streams] == [each.token_ids for each in right]
            if heir.process.poll() is not None:
                cannot_measure("the second worker ended during the run")
            victim = heir
    print(f"{runs} run(s) each way, {STREAMS} streams of {NEW_TOKENS} tokens, fp32, lease {lease:g} s")
    figures = [
        Figure("undisturbed: claim to first token, the last stream", prefill, "s"),
        *(figure for way in tried for figure in way.figures(lease)),
        Figure("texts equal to the undisturbed run", float(token_exact), "", 1, at_least=True, digits=0),
    ]
    print(figures_table(figures))
    report(
        args,
        {
            "max_s": round(max(pause for way in tried if way.harm is kill for pause in way.pauses), 3),
            "max_s_by_way": {way.name: round(max(way.pauses), 3) for way in tried},
            "taken_over_s_by_way": {way.name: round(max(way.taken_over), 3) for way in tried if way.taken_over},
            "undisturbed_first_token_s": round(prefill, 3),
            "lease_s": lease,
            "token_exact": token_exact,
            "runs": runs * len(tried),
        },
        figures,
    )


def main() -> None:
    asyncio.run(run(arguments(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
