"""arq's Worker, cut by role: this part takes jobs from the queue and sees each through to its end.

What stays arq's is the registry of functions, the tables of tasks, and the flag that says whether jobs are picked.
What is replaced: the poll (one script claims any number of jobs, woken by a bell), and the run and the end of a job
(leases, fencing and terminal events instead of timeouts, retries and results). A Redis error never ends the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from arq.connections import ArqRedis
from arq.cron import CronJob
from arq.worker import Function, Worker, func
from structlog.contextvars import bound_contextvars

from inferq.engine.errors import EngineCrashedError, EngineDeadError
from inferq.producer.contract import FUNCTION, decode_json, encode_json
from inferq.producer.events import Finished, TerminalEvent

from .background import REDIS_ERRORS, Outage
from .clock import RedisClock
from .commands import Claimed, DeadLetter, Outcome, WorkerCommands
from .errors import Dropped, ShuttingDown
from .generate import Generation, generate
from .log import cause, get_logger
from .prepare import failure, read_call, run_where_it_fits
from .room import EngineRoom
from .settings import WorkerSettings

#: A call is given up sooner than that: its lease may begin so much later than the call.
_CALL_SECONDS: Final = 30.0
_log = get_logger("queue")


class QueueWorker(Worker):
    """Claims jobs while there is room. `open_generation` makes a claimed job's Generation."""

    def __init__(
        self,
        settings: WorkerSettings,
        redis: ArqRedis,
        commands: WorkerCommands,
        *,
        room: EngineRoom,
        clock: RedisClock,
        open_generation: Callable[[Claimed], Generation],
    ) -> None:
        super().__init__(
            functions=[func(generate, name=FUNCTION)],
            queue_name=settings.keys.queue,
            redis_pool=redis,
            handle_signals=False,
            max_jobs=room.slots,
            poll_delay=settings.claim_seconds,
            keep_result=0,
            job_serializer=encode_json,
            job_deserializer=decode_json,
        )
        self.generations: dict[str, Generation] = {}  #: claimed and not ended, by request id
        self.has_room = asyncio.Event()  #: set while a job could be taken
        self.has_room.set()
        self._settings = settings
        self._commands = commands
        self._room = room
        self._clock = clock
        self._open_generation = open_generation
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._claiming = False
        self._interruption: Exception | None = None
        self._last_answer = float("-inf")
        self._lost_claims: dict[str, float] = {}  # tokens of calls without an answer, and when their leases have ended
        self._takeover_from = float("inf")

    # ---- what others ask of it ----

    def ring(self) -> None:
        """Look at the queue now."""
        self._wake.set()

    def stop_picking(self) -> None:
        """Claim nothing more; what is claimed goes on. The main loop ends after the claim under way."""
        self.allow_pick_jobs = False
        self._update_room()
        self._stopped.set()
        self._wake.set()

    async def wait_idle(self) -> None:
        """Return when nothing runs and no claim is under way."""
        await self._idle.wait()

    def interrupt_all(self, error: Exception) -> None:
        """End all that runs, and what a claim under way still brings."""
        self._interruption = error
        for generation in list(self.generations.values()):
            generation.interrupt(error)

    # ---- arq's hooks ----

    async def main(self) -> None:
        """Claim when the bell rang, when a slot is free again, and at every poll. Ends after `stop_picking`."""
        outage = Outage("queue")
        while self.allow_pick_jobs:
            self._wake.clear()
            try:
                await self._poll_iteration()
            except REDIS_ERRORS as exc:
                # Nobody could renew a lease meanwhile: those that lapsed are their owners' for one lease more.
                self._distrust_leases()
                await _wait(self._stopped, outage.failed(exc))
            else:
                outage.over()
                await _wait(self._wake, self.poll_delay_s)

    async def _poll_iteration(self) -> None:
        """Claim as many jobs as there are free slots; with none, still end what lapsed, was cancelled or expired."""
        self._claiming = True
        self._update_room()
        try:
            claimed = await self._claim()
            for each in claimed:
                generation = self.generations[each.request_id] = self._open_generation(each)
                if self._interruption is not None:
                    generation.interrupt(self._interruption)
            await self.start_jobs([each.request_id.encode() for each in claimed])
        finally:
            self._claiming = False
            self._update_room()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start a task for each job that was just claimed."""
        for job_id in map(bytes.decode, job_ids):
            self.job_counter += 1
            task = self.tasks[job_id] = self.loop.create_task(self.run_job(job_id, 0), name=f"generate-{job_id}")
            task.add_done_callback(lambda task, job_id=job_id: self._ended(job_id, task))  # type: ignore[misc]

    async def run_job(self, job_id: str, score: int) -> None:
        """See a claimed job through to its terminal event, whatever is wrong with it."""
        generation = self.generations[job_id]
        with bound_contextvars(request_id=job_id):
            dead: DeadLetter | None = None
            try:
                event = await self._call(generation)
            except Dropped as why:
                _log.warning("request.dropped", why=str(why))
                return
            except (ShuttingDown, EngineDeadError):
                # Neither is the request's fault: another worker goes on from what was published.
                await self._hand_back(generation)
                return
            except Exception as exc:
                event = failure(exc, generation.claimed.attempt)
                if isinstance(exc, EngineCrashedError):
                    dead = DeadLetter(event.code.value, event.attempts)
                _log.debug("request.raised", **cause(exc))
            outcome = await generation.finish(event, dead=dead)
            self._count(event, outcome)

    # ---- its own ----

    async def _claim(self) -> list[Claimed]:
        now = time.monotonic()
        if now - self._last_answer > self._longest_silence:
            self._distrust_leases()
        token = secrets.token_hex(8)
        slots = self.max_jobs - self.job_counter if self._room.is_open else 0
        self._lost_claims = {each: lapsed_at for each, lapsed_at in self._lost_claims.items() if lapsed_at > now}
        lost = list(self._lost_claims)
        if slots or lost:
            # Until there is an answer, nobody knows whether this call has taken jobs.
            self._lost_claims[token] = now + self._settings.lease_seconds + _CALL_SECONDS
        claimed = await self._commands.claim(
            worker=self._settings.worker_id,
            token=token,
            lost_tokens=lost,
            lease_ms=self._settings.lease_ms,
            slots=slots,
            free_blocks=self._room.free_blocks(each.uncounted_tokens for each in self.generations.values()),
            block_size=self._room.block_size,
            largest_request=self._room.largest_request,
            running_here=self.job_counter,
            takeover=now >= self._takeover_from,
            grace_end_ms=int(self._clock.ms_at(self._takeover_from)),
            asked_at_ms=int(self._clock.ms_at(now)),
            max_attempts=self._settings.max_attempts,
            accept_plain=self._settings.accept_plain_jobs,
            exclude=self.generations.keys(),
        )
        self._last_answer = time.monotonic()
        if self._last_answer - now > self._longest_silence:
            self._distrust_leases()
        self._lost_claims.clear()
        return claimed

    @property
    def _longest_silence(self) -> float:
        """Seconds without an answer after which leases may have lapsed that their owners could not renew."""
        return max(self._settings.lease_seconds / 2, 2 * self.poll_delay_s)

    async def _call(self, generation: Generation) -> TerminalEvent:
        claimed = generation.claimed
        function, request = await run_where_it_fits(len(claimed.payload), self._read, claimed)
        event: TerminalEvent = await function.coroutine({**self.ctx, "generation": generation}, request)
        return event

    def _read(self, claimed: Claimed) -> tuple[Function | CronJob, Any]:
        """What the job calls, and with what. Nothing of a payload is decoded before its signature was checked."""
        signing = self._settings.signing_keys
        if signing is not None:
            queue = self._settings.keys.queue
            signing.verify(claimed.signature, claimed.request_id, queue=queue, payload=claimed.payload)
        return read_call(claimed.payload, self.functions)

    async def _hand_back(self, generation: Generation) -> None:
        outcome = await generation.hand_back()
        if outcome is Outcome.OK:
            _log.info("request.handed_back", tokens=generation.outbox.num_tokens)
        else:
            _log.warning("request.dropped", why=outcome.value if outcome else "lease lost")

    def _count(self, event: TerminalEvent, outcome: Outcome | None) -> None:
        if outcome is not Outcome.OK:
            _log.warning("request.dropped", why=outcome.value if outcome else "lease lost")
        elif isinstance(event, Finished):
            self.jobs_complete += 1
            _log.info("request.finished", **event.model_dump(mode="json", exclude={"type"}))
        else:
            self.jobs_failed += 1
            _log.warning("request.failed", code=event.code.value, attempts=event.attempts)

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        del self.tasks[job_id]
        del self.generations[job_id]
        self.job_counter -= 1
        self._update_room()
        self._wake.set()
        if not task.cancelled() and (exc := task.exception()) is not None:
            _log.error("request.abandoned", request_id=job_id, **cause(exc))

    def _update_room(self) -> None:
        if self.allow_pick_jobs and self.job_counter < self.max_jobs:
            self.has_room.set()
        else:
            self.has_room.clear()
        if self.job_counter or self._claiming:
            self._idle.clear()
        else:
            self._idle.set()

    def _distrust_leases(self) -> None:
        """After a lost connection, and before the first: take over nothing for one lease length."""
        self._takeover_from = time.monotonic() + self._settings.lease_seconds


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
