"""The engine as its user holds it: start, add, generate, abort, stop.

Puts together the supervisor that owns the child, the tracker that owns the requests, and the text side, which comes
with the model that the child has loaded. Never imports torch, and knows nothing of Redis.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from .admission import Admission, Prompt, load_text
from .child_log import log_line
from .config import EngineConfig
from .errors import EngineDeadError, EngineError
from .launch import Asked, Launcher
from .pipe import Log, Ready, Stats
from .request import Completion, Delta, RequestFields, SamplingParams
from .restart import RestartPolicy
from .stream import AsyncStream, Sink, StreamControl, open_stream
from .supervisor import Owner, Supervisor
from .tracked import PausedBy
from .tracker import RequestTracker

if TYPE_CHECKING:
    from .text import TextProcessor

DEFAULT_COMMAND: Final = (sys.executable, "-m", "inferq.engine.process")
DEFAULT_SAMPLING: Final = SamplingParams()


class AsyncInferenceEngine:
    """Runs a model in a child process, for many requests at once. Belongs to one event loop.

    Start it from the main thread: only then does the kernel end the child with its parent whatever happens. As an
    async context manager it starts on entry and stops on exit. `log` takes the child's log lines, which go to the
    standard library's logging by default. With a `restart` policy, a child that dies or hangs is started again, and
    the requests go on where they were; without one its death is the engine's. A dead engine stays dead: make a new one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = DEFAULT_COMMAND,
        log: Callable[[Log], None] | None = None,
        restart: RestartPolicy | None = None,
    ) -> None:
        self.config = config
        self._tracker = RequestTracker(
            lambda message: self._supervisor.send(message), max_requests=config.max_num_seqs + config.max_waiting
        )
        owner = Owner(
            on_message=self._tracker.on_message,
            on_ready=self._tracker.child_ready,
            on_crash=self._tracker.child_died,
            on_death=self._on_death,
            log=log or log_line,
        )
        self._supervisor = Supervisor(command, config, owner, restart)
        self._launcher = Launcher(self._tracker)  #: open from ready on

    def __repr__(self) -> str:
        state = self._supervisor.death or ("running" if self.is_running else "not ready")
        return f"<AsyncInferenceEngine {self.config.model}: {state}, {self.num_requests} requests>"

    # ---- life ----

    async def start_engine_loop(self) -> Ready:
        """Start the child, wait until its model is loaded, and send it what was added meanwhile.

        Raises EngineError if it was started before, EngineDeadError if it is dead or dies on the way. Cancelled
        meanwhile, it leaves no child.
        """
        facts = await self._supervisor.start()
        try:
            text = await asyncio.to_thread(load_text, facts.text_dir)
            self._supervisor.check_alive()
            await self._launcher.open(Admission(facts, text))
        except BaseException as exc:
            await self._supervisor.stop(f"the engine could not be started: {exc!r}")
            if isinstance(exc, EngineError) or not isinstance(exc, Exception):
                raise
            raise EngineDeadError(self._supervisor.death) from exc
        return facts

    async def stop(self) -> None:
        """End every stream with EngineDeadError and the child in good order. May be called again, and by many."""
        await self._supervisor.stop()

    async def wait_dead(self) -> EngineDeadError:
        """Return why the engine died for good, when it has."""
        return EngineDeadError(await self._supervisor.wait_dead())

    async def __aenter__(self) -> Self:
        await self.start_engine_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ---- facts ----

    @property
    def is_running(self) -> bool:
        """True from ready to death for good: requests are taken, if only to wait for the next child."""
        return self._launcher.is_open and self._supervisor.death is None

    @property
    def is_restarting(self) -> bool:
        """True from a child's death until the next one works for everybody: new requests are taken, but wait."""
        return self.is_running and not self._tracker.is_open

    @property
    def num_restarts(self) -> int:
        """How many times the child was started again."""
        return self._supervisor.num_restarts

    @property
    def facts(self) -> Ready:
        """The model's facts. Raises EngineError before the engine is ready."""
        return self._launcher.admission.facts

    @property
    def text(self) -> TextProcessor:
        """Tokenizer and chat template. Raises EngineError before the engine is ready."""
        return self._launcher.admission.text

    @property
    def stats(self) -> Stats | None:
        """The child's counters as last heard; None while this one has not said anything."""
        return self._tracker.stats

    @property
    def num_requests(self) -> int:
        """Requests that have not ended for their users."""
        return len(self._tracker)

    @property
    def idle(self) -> bool:
        """True when no request is left, here and in the child."""
        return self._tracker.idle

    # ---- requests ----

    async def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingParams = DEFAULT_SAMPLING,
    ) -> AsyncStream:
        """Take a request: exactly one of the three kinds of prompt. Returns its stream.

        Before the engine is ready the request is held, and its stream tells what is wrong with it. Raises
        InvalidRequestError, DuplicateRequestError, EngineOverloadedError, EngineDeadError.
        """
        checked = Prompt(prompt, prompt_token_ids, messages)
        self._supervisor.check_alive()
        tracker = self._tracker
        key = tracker.new_key()
        pause, resume = partial(tracker.pause, key, PausedBy.READER), partial(tracker.resume, key, PausedBy.READER)
        control = StreamControl(partial(tracker.abort, key), pause, resume)
        sink, stream = open_stream(request_id, control)
        tracker.reserve(key, request_id, sink)
        asked = Asked(key, request_id, checked, sampling, sink)
        if not self.is_running:
            self._launcher.hold(asked)
            return stream
        try:
            await self._launcher.launch(asked)
        except BaseException:
            tracker.release(key)
            raise
        return stream

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: Sink,
        *,
        generated: Sequence[int] = (),
    ) -> None:
        """Take a tokenized request whose output goes to `sink`, which is not called before this returns.

        `generated` are the first tokens of its output, from an earlier run: it goes on behind them and behind the text
        that they had released, as if it had not been interrupted. `sampling` is the same as in that run. Where they are
        many, the request is launched, and an abort answered, when a thread has worked out that text.
        Raises as `add_request` does, and EngineError before the engine is ready.
        """
        self._supervisor.check_alive()
        self._launcher.submit(request_id, prompt_token_ids, sampling, sink, generated)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: in a thread where it is long, and not at all where it cannot fit.

        Raises InvalidRequestError, and EngineError before the engine is ready.
        """
        return await self._launcher.admission.tokenize(prompt)

    async def generate(
        self, prompt: str | None = None, *, request_id: str | None = None, **fields: Unpack[RequestFields]
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one request, which is added with the first step of the iteration and aborted when that closes.

        Raises as `add_request` does, and the request's own EngineError.
        """
        async with await self.add_request(request_id or uuid.uuid4().hex, prompt, **fields) as stream:
            async for delta in stream:
                yield delta

    async def complete(
        self, prompt: str | None = None, *, request_id: str | None = None, **fields: Unpack[RequestFields]
    ) -> Completion:
        """The whole answer. Raises as `generate` does; cancelled meanwhile, it aborts the request."""
        async with await self.add_request(request_id or uuid.uuid4().hex, prompt, **fields) as stream:
            return await stream.collect()

    def abort(self, request_id: str) -> bool:
        """End a request: its stream gets what is held back, and CANCELLED. False, and no harm, if no such one lives."""
        key = self._tracker.key_of(request_id)
        return key is not None and self._tracker.abort(key)

    def pause(self, request_id: str) -> None:
        """Leave a request out of further steps, its blocks kept, until `resume`, whatever its reader does."""
        if (key := self._tracker.key_of(request_id)) is not None:
            self._tracker.pause(key)

    def resume(self, request_id: str) -> None:
        if (key := self._tracker.key_of(request_id)) is not None:
            self._tracker.resume(key)

    def freed(self, request_id: str) -> asyncio.Future[Stats | None]:
        """Done when the child holds no block of that request: with its counters then, or None if it has died.

        Asked for while the request lives, or after its abort and before its id is used again.
        """
        future: asyncio.Future[Stats | None] = asyncio.get_running_loop().create_future()
        self._tracker.when_freed(request_id, lambda stats: None if future.done() else future.set_result(stats))
        return future

    # ---- inside ----

    def _on_death(self, reason: str) -> None:
        self._launcher.clear()
        self._tracker.fail_all(reason)
