"""How long a waiting job will wait, roughly: from the jobs before it, the workers' slots and the age of what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .fleet import read_workers
from .position import EntryId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arq.connections import ArqRedis

    from .contract import Keys

#: So many running jobs stand for all of them.
_SAMPLE: Final = 32


async def estimate_wait(redis: ArqRedis, keys: Keys, position: int) -> float | None:
    """Seconds until the job with `position` waiting jobs of the model before it starts. None: nobody can tell."""
    workers = [each for each in await read_workers(redis, keys) if each.model == keys.model and not each.silent]
    slots = sum(each.slots for each in workers)
    if not slots:
        return None
    async with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zcard(keys.running)
        pipe.zrange(keys.running, 0, _SAMPLE - 1)
        (seconds, micros), num_running, ids = await pipe.execute()
    async with redis.pipeline(transaction=False) as pipe:
        for request_id in ids:
            pipe.xrevrange(keys.events(request_id.decode()), count=1)
        ends: list[Any] = await pipe.execute()
    # An owner's epoch is the time at which it claimed the job, in microseconds.
    now_us = seconds * 1_000_000 + micros
    ages = [max(0.0, (now_us - EntryId.parse(end[0][0]).epoch) / 1e6) for end in ends if end]
    return wait_seconds(position, slots=slots, running=num_running, ages_s=ages)


def wait_seconds(position: int, *, slots: int, running: int, ages_s: Sequence[float]) -> float | None:
    """A job that is met at a random moment is half done, on average: it takes twice its age.

    So `running` jobs of a mean age A end at a rate of running / 2A, and a free slot costs no time.
    """
    ahead = position + 1 - max(0, slots - running)
    if ahead <= 0:
        return 0.0
    if not ages_s or not running:
        return None
    return ahead * 2 * sum(ages_s) / len(ages_s) / running
