"""One request from its claim to its terminal event.

Between the two the task of a request waits: its tokens go from the engine to the publisher in one synchronous pass a
step. How it ends is decided once, by whoever comes first: the engine, a cancellation, a deadline, a lost lease, a
shutdown. Knows neither Redis nor the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from inferq.engine.admission import Prompt
from inferq.engine.errors import EngineError
from inferq.engine.request import Delta, SamplingParams
from inferq.engine.stream import Sink
from inferq.producer.events import Finished, FinishReason, TerminalEvent, Timings, Usage

from .clock import RedisClock
from .commands import Claimed, DeadLetter, Outcome
from .errors import Dropped, ServerFull
from .log import get_logger
from .outbox import Outbox
from .prepare import parse, run_where_it_fits
from .progress import Progress
from .publisher import Publisher

_log: Any = get_logger("request")


class Engine(Protocol):
    """What a request asks of the engine; AsyncInferenceEngine has it."""

    async def tokenize(self, prompt: Prompt) -> list[int]: ...

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: Sink,
        *,
        generated: Sequence[int] = (),
    ) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...


class Restores(Protocol):
    """Where a request reads what was published of it, and gets its stream back; Recovery has it."""

    async def read(self, request_id: str) -> Progress: ...

    def get_back(self, owner: Generation) -> None: ...


async def generate(ctx: dict[Any, Any], request: Any) -> Finished:
    """The function that arq knows: one request, as it came over the wire. Raises what `failure` explains."""
    generation: Generation = ctx["generation"]
    return await generation.run(request)


class Generation:
    """A claimed request, and the sink of its output."""

    def __init__(
        self,
        claimed: Claimed,
        *,
        model: str,
        engine: Engine,
        publisher: Publisher,
        recovery: Restores,
        clock: RedisClock,
        max_unsent_tokens: int,
    ) -> None:
        self.claimed = claimed
        self._model = model
        self._engine = engine
        self._publisher = publisher
        self._recovery = recovery
        self._clock = clock
        self.outbox = Outbox(
            request_id=claimed.request_id,
            token=claimed.token,
            generation=claimed.generation,
            epoch=claimed.epoch,
            max_unsent_tokens=max_unsent_tokens,
            on_pressure=self._hold_back,
            on_lost=self._on_lost,
            on_stuck=self._give_up,
        )
        self._end: asyncio.Future[FinishReason | Exception] = asyncio.get_running_loop().create_future()
        self._stopping: FinishReason | None = None  #: what an abort that is under way stands for
        self._deadline: asyncio.TimerHandle | None = None
        self._claimed_at = time.monotonic()
        self._first_token_at: float | None = None
        self._num_prompt_tokens = 0
        self._max_tokens = 0  #: as asked for
        self._before: Progress | None = None  #: what earlier owners have published

    def __repr__(self) -> str:
        return f"<Generation {self.request_id} tokens={self.outbox.num_tokens} ended={self._end.done()}>"

    @property
    def request_id(self) -> str:
        return self.claimed.request_id

    @property
    def token(self) -> str:
        return self.claimed.token

    @property
    def uncounted_tokens(self) -> int:
        """About how many tokens it will hold that the engine's counters do not show yet; none from its first on.

        Until it is tokenized that is what the claim took it for.
        """
        if self._first_token_at is not None:
            return 0
        if self._num_prompt_tokens == 0:
            return self.claimed.estimate
        return self._num_prompt_tokens + self._max_tokens

    async def run(self, request: Any) -> Finished:
        """Generate until the end. Raises what went wrong, Dropped when nothing may be written any more."""
        if self.claimed.expires_at_ms is not None:
            self._stop_in(self._clock.seconds_until(self.claimed.expires_at_ms))
        try:
            size = len(self.claimed.payload)
            asked = await run_where_it_fits(size, parse, request, self.claimed, self._model)
            self._max_tokens = asked.sampling.max_tokens or 0
            prompt_token_ids = await self._engine.tokenize(asked.prompt)
            self._num_prompt_tokens = len(prompt_token_ids)
            if self.claimed.resumed:
                await self._restore()
            if asked.deadline_ms is not None and self._deadline is None:
                # A plain arq job: nobody but its owner knows the deadline, and it counts from the first claim on.
                self._stop_in(self._began_at() - time.monotonic() + asked.deadline_ms / 1000)
            if not self._end.done():
                generated = tuple(self.outbox.token_ids)
                self._engine.submit(self.request_id, prompt_token_ids, asked.sampling, self, generated=generated)
            end = await self._end
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
        if isinstance(end, Exception):
            raise end
        return Finished(finish_reasons=(end,), usage=self._usage(), timings=self._timings())

    async def _restore(self) -> None:
        """Go on from what earlier owners have published. An answer that they have completed lacks its end alone."""
        self._before = await self._recovery.read(self.request_id)
        self.outbox.continue_from(self._before)
        _log.info("request.resumed", request_id=self.request_id, tokens=self.outbox.num_tokens)
        if self.outbox.finish_reason is not None:
            self._resolve(self.outbox.finish_reason)

    async def finish(self, event: TerminalEvent, *, dead: DeadLetter | None = None) -> Outcome | None:
        """One way out: what is left, then the terminal event. None if the request was dropped."""
        self._resolve(Dropped("ended"))
        return await self._publisher.finish(self.outbox, event, dead=dead)

    async def hand_back(self) -> Outcome | None:
        """The other way out: what is left, then the job to the queue. None if the request was dropped."""
        self._resolve(Dropped("handed back"))
        return await self._publisher.hand_back(self.outbox)

    # ---- from the engine, in the pass of a step ----

    def put(self, delta: Delta) -> None:
        if self._end.done():
            return
        if self._first_token_at is None and delta.token_ids:
            self._first_token_at = time.monotonic()
        if delta.finish_reason is None:
            self._publisher.put(self.outbox, delta)
            return
        reason = self._stopping or FinishReason(delta.finish_reason.value)
        if self._stopping is FinishReason.CANCELLED and self.outbox.discard():
            # Text that belongs to tokens nobody will see is not shown either.
            delta = Delta(self.outbox.num_tokens, self.outbox.num_chars, "", ())
        self._publisher.put(self.outbox, delta, reason)
        self._resolve(reason)

    def fail(self, error: EngineError) -> None:
        self._resolve(error)

    # ---- from the worker ----

    def cancel(self) -> None:
        """End with what was published: from here on no further token is."""
        self._stop(FinishReason.CANCELLED)

    def lose(self, why: str) -> None:
        """The lease, or the end of the stream, may be somebody else's: publish nothing until that is known."""
        self.outbox.lose(why)

    def drop(self, why: str) -> None:
        """Publish nothing more."""
        self.outbox.drop()
        self.interrupt(Dropped(why))

    def interrupt(self, error: Exception) -> None:
        """End with an error, whatever the engine does."""
        if self._resolve(error):
            self._engine.abort(self.request_id)

    def _stop(self, reason: FinishReason) -> None:
        if self._end.done() or self._stopping is not None:
            return
        self._stopping = reason
        if not self._engine.abort(self.request_id):  # not in the engine yet: nothing of it was generated
            self._resolve(reason)

    def _resolve(self, end: FinishReason | Exception) -> bool:
        if self._end.done():
            return False
        self._end.set_result(end)
        return True

    def _stop_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(max(0.0, seconds), self._stop, FinishReason.DEADLINE)

    def _on_lost(self, why: str) -> None:
        _log.info("request.lost", request_id=self.request_id, why=why)
        self._recovery.get_back(self)

    def _give_up(self, reason: str | None) -> None:
        """A full server takes the end of a request at least. Of another that refuses, nobody knows when it will."""
        if reason is None:
            self.interrupt(ServerFull())
        else:
            self.drop(f"Redis refuses to write: {reason}")

    def _hold_back(self, over: bool) -> None:
        if self._end.done():
            return
        if over:
            self._engine.pause(self.request_id)
        else:
            self._engine.resume(self.request_id)

    def _usage(self) -> Usage:
        return Usage(prompt_tokens=self._num_prompt_tokens, completion_tokens=self.outbox.num_tokens)

    def _timings(self) -> Timings:
        """Of the whole request, from its first claim on, but for the time in the queue."""
        now, before, began_at = time.monotonic(), self._before, self._began_at()
        # When an earlier owner's first token came stands nowhere.
        first = None if before is not None and before.token_ids else self._first_token_at
        return Timings(
            queue_ms=self.claimed.queue_ms,
            ttft_ms=None if first is None else round((first - began_at) * 1000, 3),
            total_ms=round((now - began_at) * 1000, 3),
        )

    def _began_at(self) -> float:
        """When the request was first claimed, by this process' clock."""
        if self._before is None or self._before.started_ms is None:
            return self._claimed_at
        return min(self._claimed_at, time.monotonic() + self._clock.seconds_until(self._before.started_ms))
