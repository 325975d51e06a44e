"""Which requests live in the engine, and where their output goes: one synchronous pass for each message of the child.

A request goes by its id towards the user and by a key towards the child. A key is used once, so what is on its way
for a request that has ended meets nobody, and the id is free at once. Every sink gets exactly one end. Knows text
only as an OutputText that it pushes tokens into; standard library only.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from .admission import Admitted
from .errors import (
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestFailedError,
)
from .pipe import Abort, Add, Down, Freed, Pause, Refused, Resume, Stats, Step
from .request import Delta, FinishReason
from .stream import Sink

if TYPE_CHECKING:
    from .detokenizer import OutputText

_logger = logging.getLogger(__name__)

#: Called once when the child holds nothing of a request any more, with its counters then; None if the child died.
OnFreed = Callable[[Stats | None], None]


class PausedBy(Enum):
    """Why a request is paused: it goes on when no reason is left."""

    USER = auto()
    READER = auto()  #: its stream holds too much that was not read


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    key: int
    sink: Sink
    output: OutputText | None = None  #: None until the request was sent to the child
    num_tokens: int = 0
    num_chars: int = 0
    paused: set[PausedBy] = field(default_factory=set)
    on_freed: list[OnFreed] = field(default_factory=list)

    @property
    def launched(self) -> bool:
        return self.output is not None

    def delta(self, text: str, token_ids: tuple[int, ...], reason: FinishReason | None) -> Delta:
        """The next delta, put behind all that came before it."""
        delta = Delta(self.num_tokens, self.num_chars, text, token_ids, reason)
        self.num_tokens += len(token_ids)
        self.num_chars += len(text)
        return delta


class RequestTracker:
    """All requests between their start and their end. Not thread-safe: it belongs to one event loop.

    A request is reserved (its id is taken, the child has not heard of it), then launched. `send` takes messages for
    the child, and may raise for an Add alone.
    """

    def __init__(self, send: Callable[[Down], None], *, max_requests: int) -> None:
        self._send = send
        self._max_requests = max_requests
        self._keys = itertools.count(1)
        self._live: dict[int, _Request] = {}
        self._keys_by_id: dict[str, int] = {}
        self._leaving: dict[int, _Request] = {}  #: ended here; the child has not said yet that it knows
        self.stats: Stats | None = None  #: the child's counters as last heard

    def __len__(self) -> int:
        return len(self._live)

    def __repr__(self) -> str:
        return f"<RequestTracker live={len(self._live)} leaving={len(self._leaving)}>"

    @property
    def idle(self) -> bool:
        """True when nothing is left, here and in the child."""
        return not (self._live or self._keys_by_id or self._leaving)

    # ---- from the user ----

    def new_key(self) -> int:
        return next(self._keys)

    def key_of(self, request_id: str) -> int | None:
        """The key of the live request of that id."""
        return self._keys_by_id.get(request_id)

    def reserve(self, key: int, request_id: str, sink: Sink) -> None:
        """Take the id. Raises DuplicateRequestError, EngineOverloadedError."""
        if request_id in self._keys_by_id:
            raise DuplicateRequestError(f"a request {request_id!r} is in the engine")
        if len(self._live) >= self._max_requests:
            raise EngineOverloadedError(
                f"{len(self._live)} requests are in the engine: max_num_seqs + max_waiting is {self._max_requests}"
            )
        self._live[key] = _Request(request_id, key, sink)
        self._keys_by_id[request_id] = key

    def launch(self, key: int, prompt_token_ids: Sequence[int], admitted: Admitted) -> None:
        """Send a reserved request to the child; nothing happens if it has ended meanwhile.

        What sending raises is passed on, and the request is then reserved as before: release or fail it.
        """
        if (request := self._live.get(key)) is None:
            return
        self._send(Add(key, list(prompt_token_ids), admitted.sampling))
        request.output = admitted.output
        if request.paused:
            self._send(Pause(key))

    def release(self, key: int) -> None:
        """Give back an id whose request is not launched after all; its sink is not told."""
        if (request := self._live.get(key)) is not None and not request.launched:
            self._forget(request)

    def abort(self, key: int) -> bool:
        """End a request with what it has; False if it has ended already."""
        if (request := self._live.get(key)) is None:
            return False
        self._forget(request)
        self._tell_child(request)
        try:
            text = request.output.flush() if request.output is not None else ""
            request.sink.put(request.delta(text, (), FinishReason.CANCELLED))
        except Exception as exc:
            self._fail(request, exc)
        return True

    def pause(self, key: int, by: PausedBy = PausedBy.USER) -> None:
        """Leave the request out of further steps, its blocks kept, until it is resumed for every reason given."""
        if (request := self._live.get(key)) is not None:
            if request.launched and not request.paused:
                self._send(Pause(key))
            request.paused.add(by)

    def resume(self, key: int, by: PausedBy = PausedBy.USER) -> None:
        if (request := self._live.get(key)) is not None and by in request.paused:
            request.paused.remove(by)
            if request.launched and not request.paused:
                self._send(Resume(key))

    def when_freed(self, request_id: str, on_freed: OnFreed) -> None:
        """Have `on_freed` called when the child holds nothing of that request: at once if that is so now."""
        leaving = (r for r in reversed(self._leaving.values()) if r.request_id == request_id)
        key = self.key_of(request_id)
        request = self._live[key] if key is not None else next(leaving, None)
        if request is None:
            on_freed(self.stats)
        else:
            request.on_freed.append(on_freed)

    # ---- from the child ----

    def on_step(self, step: Step) -> None:
        """Hand out what a step produced. Raises ValueError or TypeError for what is not a step's output."""
        self.stats = step.stats
        for key, token_ids, reason in step.outputs:
            finish_reason = None if reason is None else FinishReason(reason)
            # Tokens of a request that has ended here meanwhile are dropped, and counted nowhere.
            if (request := self._live.get(key)) is not None:
                self._deliver(request, token_ids, finish_reason)
            if finish_reason is not None and request is not None:
                _call_all(request.on_freed, step.stats)

    def _deliver(self, request: _Request, token_ids: Sequence[int], reason: FinishReason | None) -> None:
        try:
            assert request.output is not None, "the child has sent tokens for a request that it was not given"
            piece = request.output.push(token_ids, reason)
            delta = request.delta(piece.text, piece.token_ids, piece.finish_reason)
            if piece.finish_reason is not None:
                self._forget(request)
                if reason is None:
                    self._tell_child(request)
            request.sink.put(delta)
        except Exception as exc:
            if request.key in self._live:
                self._forget(request)
                if reason is None:
                    self._tell_child(request)
            self._fail(request, exc)

    def on_refused(self, refused: Refused) -> None:
        """The child did not take the request, or it failed there alone."""
        error = InvalidRequestError if refused.invalid else RequestFailedError
        self.fail(refused.key, error(refused.message))

    def on_freed(self, freed: Freed) -> None:
        self.stats = freed.stats
        if (request := self._leaving.pop(freed.key, None)) is not None:
            _call_all(request.on_freed, freed.stats)

    # ---- from the engine ----

    def fail(self, key: int, error: EngineError) -> None:
        """End one request that is not in the child: it was refused there, or never got so far."""
        if (request := self._live.get(key)) is not None:
            self._forget(request)
            self._fail(request, error)
            _call_all(request.on_freed, self.stats)

    def fail_all(self, reason: str) -> None:
        """The child has died: every request ends with an EngineDeadError of its own, and nothing is left."""
        ended = [*self._live.values(), *self._leaving.values()]
        live = list(self._live.values())
        self._live.clear()
        self._keys_by_id.clear()
        self._leaving.clear()
        for request in live:
            self._fail(request, EngineDeadError(reason))
        for request in ended:
            _call_all(request.on_freed, None)

    def _forget(self, request: _Request) -> None:
        del self._live[request.key]
        del self._keys_by_id[request.request_id]

    def _tell_child(self, request: _Request) -> None:
        if request.launched:
            self._leaving[request.key] = request
            self._send(Abort(request.key))
        else:
            _call_all(request.on_freed, self.stats)

    def _fail(self, request: _Request, cause: Exception) -> None:
        """Nobody else is touched by what goes wrong with one request, not even by its sink's own failure."""
        if isinstance(cause, EngineError):
            error = cause
        else:
            _logger.error("request %s failed", request.request_id, exc_info=cause)
            error = RequestFailedError(f"the request failed: {cause!r}")
            error.__cause__ = cause
        try:
            request.sink.fail(error)
        except Exception:
            _logger.exception("the sink of request %s failed", request.request_id)


def _call_all(callbacks: list[OnFreed], stats: Stats | None) -> None:
    for callback in callbacks:
        callback(stats)
    callbacks.clear()
