"""What lies between asking for a request and its launch: tokens, a look at its limits, its text of an earlier run.

A request that comes before the model is there is held. Whatever takes long happens in a thread, one request at a time,
and the request may end meanwhile. Knows neither the child nor what happens after a launch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from .admission import Admission, Admitted, Prompt
from .errors import EngineError, RequestFailedError
from .pipe import Stats
from .request import SamplingParams
from .stream import Sink, StreamSink
from .tracker import RequestTracker


@dataclass(frozen=True, slots=True)
class Asked:
    """A reserved request as its user has put it."""

    key: int
    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    sink: StreamSink


class Launcher:
    """Launches requests into a tracker. Belongs to one event loop."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._admission: Admission | None = None
        self._held: dict[int, Asked] = {}  #: by key, in the order they came
        self._resuming: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """True from `open` on."""
        return self._admission is not None

    @property
    def admission(self) -> Admission:
        """Raises EngineError before `open`."""
        if self._admission is None:
            raise EngineError("the engine is not ready")
        return self._admission

    async def open(self, admission: Admission) -> None:
        """The model is there: launch who was held."""
        self._admission = admission
        while self._held:
            asked = self._held.pop(next(iter(self._held)))
            try:
                await self.launch(asked)
            except Exception as exc:
                self._fail(asked.key, exc)

    def clear(self) -> None:
        """Nothing will be launched any more: whoever waits here is forgotten."""
        self._held.clear()
        for task in self._resuming:
            task.cancel()

    def hold(self, asked: Asked) -> None:
        """Until `open`, or its own end."""

        def let_go(_: Stats | None) -> None:
            self._held.pop(asked.key, None)

        self._held[asked.key] = asked
        self._tracker.when_freed(asked.request_id, let_go)

    async def launch(self, asked: Asked) -> None:
        """Raises what is wrong with it, and what launching it raises; it is reserved as before then."""
        token_ids = await self.admission.tokenize(asked.prompt)
        admitted = self.admission.admit(token_ids, asked.sampling)
        asked.sink.count_prompt(len(token_ids))
        self._tracker.launch(asked.key, admitted)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: Sink,
        generated: Sequence[int],
    ) -> None:
        """Reserve a tokenized request and launch it: now, or when the text of its many `generated` tokens is known.

        Raises as `AsyncInferenceEngine.submit` does; what goes wrong later is told to the sink.
        """
        admitted = self.admission.admit(prompt_token_ids, sampling, generated)
        key = self._tracker.new_key()
        self._tracker.reserve(key, request_id, sink, resumes=not admitted.is_short)
        if not admitted.is_short:
            task = asyncio.create_task(self._resume(key, admitted), name="inferq-resume")
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)
            return
        try:
            self._tracker.launch(key, admitted := admitted.replay())
        except BaseException:
            self._tracker.release(key)
            raise
        if admitted.end is not None:
            asyncio.get_running_loop().call_soon(self._tracker.complete, key)

    async def _resume(self, key: int, admitted: Admitted) -> None:
        try:
            admitted = await self.admission.in_thread(admitted.replay)
            self._tracker.launch(key, admitted)
        except Exception as exc:
            self._fail(key, exc)
        if admitted.end is not None:
            self._tracker.complete(key)

    def _fail(self, key: int, cause: Exception) -> None:
        error = cause if isinstance(cause, EngineError) else RequestFailedError(f"the request failed: {cause!r}")
        self._tracker.fail(key, error)
