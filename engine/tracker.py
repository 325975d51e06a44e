"""Which requests live in the engine, and where their output goes: one synchronous pass for each message of the child.

A request goes by its id towards the user and by a key towards the child. A key is used once, so what is on its way
for a request that has ended meets nobody, and the id is free at once. Every sink gets exactly one end; the death of a
child is none. Knows text only as an OutputText that it pushes tokens into; standard library only.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from .admission import Admitted
from .errors import (
    DuplicateRequestError,
    EngineCrashedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestFailedError,
)
from .pipe import Down, Freed, Paused, Refused, Stats, Step
from .placement import Placement
from .request import FinishReason
from .stream import Sink
from .tracked import OnFreed, PausedBy, TrackedRequest

_logger = logging.getLogger(__name__)


class RequestTracker:
    """All requests between their start and their end. Not thread-safe: it belongs to one event loop.

    A request is reserved (its id is taken), then launched: it goes to the child now, or when there is one again.
    `send` takes messages for the child, and may raise an EngineError for an Add alone.
    """

    def __init__(self, send: Callable[[Down], None], *, max_requests: int) -> None:
        self._placement = Placement(send, self.fail)
        self._max_requests = max_requests
        self._keys = itertools.count(1)
        self._live: dict[int, TrackedRequest] = {}
        self._keys_by_id: dict[str, int] = {}

    def __len__(self) -> int:
        """The requests that have an id. One that was aborted while it resumed has none, though it has yet to end."""
        return len(self._keys_by_id)

    def __repr__(self) -> str:
        return f"<RequestTracker live={len(self)} ending={len(self._live) - len(self)} {self._placement!r}>"

    @property
    def idle(self) -> bool:
        """True when nothing is left, here and in the child."""
        return not (self._live or self._keys_by_id) and self._placement.idle

    @property
    def is_open(self) -> bool:
        """False while a new request would wait for a child, or for what a death has left to be found out."""
        return self._placement.is_open

    @property
    def stats(self) -> Stats | None:
        """The child's counters as last heard; None where it has not said anything."""
        return self._placement.stats

    # ---- from the user ----

    def new_key(self) -> int:
        return next(self._keys)

    def key_of(self, request_id: str) -> int | None:
        """The key of the live request of that id."""
        return self._keys_by_id.get(request_id)

    def reserve(self, key: int, request_id: str, sink: Sink, *, resumes: bool = False) -> None:
        """Take the id. Who `resumes` has output of an earlier run that is yet to be replayed.

        Raises DuplicateRequestError, EngineOverloadedError.
        """
        if request_id in self._keys_by_id:
            raise DuplicateRequestError(f"a request {request_id!r} is in the engine")
        if len(self) >= self._max_requests:
            raise EngineOverloadedError(
                f"{len(self)} requests are in the engine: max_num_seqs + max_waiting is {self._max_requests}"
            )
        self._live[key] = TrackedRequest(request_id, key, sink, resumes=resumes)
        self._keys_by_id[request_id] = key

    def launch(self, key: int, admitted: Admitted) -> None:
        """Let a reserved request run; nothing happens if it has ended meanwhile.

        One that has all of its output already only waits for `complete`. What sending raises is passed on, and the
        request is then reserved as before: release or fail it.
        """
        if (request := self._live.get(key)) is None:
            return
        request.launch(admitted)
        if request.is_aborted:
            self._end(request)
        elif admitted.end is None:
            try:
                self._placement.enter(request)
            except BaseException:
                request.admitted = None
                raise

    def complete(self, key: int) -> None:
        """End a launched request that has all of its output already; nothing happens if it has ended meanwhile."""
        if (request := self._live.get(key)) is not None:
            self._end(request)

    def release(self, key: int) -> None:
        """Give back an id whose request is not launched after all; its sink is not told."""
        if (request := self._live.get(key)) is not None and request.admitted is None:
            self._forget(request)

    def abort(self, key: int) -> bool:
        """End a request with what it has; False if it has ended already.

        One that resumes is told its end when it is launched: until then nobody knows what it has. Its id is free.
        """
        if (request := self._live.get(key)) is None or request.is_aborted:
            return False
        if request.resumes:
            request.is_aborted = True
            del self._keys_by_id[request.request_id]
        else:
            self._end(request)
        return True

    def pause(self, key: int, by: PausedBy = PausedBy.USER) -> None:
        """Leave the request out of further steps, its blocks kept, until it is resumed for every reason given."""
        if (request := self._live.get(key)) is not None:
            request.paused.add(by)
            self._placement.update(request)

    def resume(self, key: int, by: PausedBy = PausedBy.USER) -> None:
        if (request := self._live.get(key)) is not None and by in request.paused:
            request.paused.remove(by)
            self._placement.update(request)

    def when_freed(self, request_id: str, on_freed: OnFreed) -> None:
        """Have `on_freed` called when the child holds nothing of that request: at once if that is so now."""
        key = self.key_of(request_id)
        request = self._live[key] if key is not None else self._placement.leaving(request_id)
        if request is None:
            on_freed(self.stats)
        else:
            request.on_freed.append(on_freed)

    # ---- from the child ----

    def on_message(self, message: Step | Refused | Freed | Paused) -> None:
        """Raises ValueError or TypeError for a step that is none."""
        match message:
            case Step():
                self.on_step(message)
            case Refused():
                self.on_refused(message)
            case Freed():
                self._placement.on_freed(message)
            case Paused():
                self._placement.on_paused(message)

    def on_step(self, step: Step) -> None:
        """Hand out what a step produced. Raises ValueError or TypeError for what is not a step's output."""
        self._placement.on_step(step)
        for key, token_ids, reason in step.outputs:
            finish_reason = None if reason is None else FinishReason(reason)
            # Tokens of a request that has ended here meanwhile are dropped, and counted nowhere.
            if (request := self._live.get(key)) is not None:
                self._deliver(request, token_ids, finish_reason)

    def _deliver(self, request: TrackedRequest, token_ids: Sequence[int], reason: FinishReason | None) -> None:
        try:
            assert request.admitted is not None, "the child has sent tokens for a request that it was not given"
            piece = request.admitted.output.push(token_ids, reason)
            delta = request.delta(piece.text, piece.token_ids, piece.finish_reason)
            if piece.finish_reason is None:
                self._placement.credit(request, len(piece.token_ids))
            else:
                self._forget(request, ended_in_child=reason is not None)
            request.sink.put(delta)
        except Exception as exc:
            if request.key in self._live:
                self._forget(request, ended_in_child=reason is not None)
            self._fail(request, exc)

    def on_refused(self, refused: Refused) -> None:
        """The child did not take the request, or it failed there alone."""
        error = InvalidRequestError if refused.invalid else RequestFailedError
        self._placement.on_refused(refused.key)
        self.fail(refused.key, error(refused.message))

    # ---- from the engine ----

    def child_ready(self) -> None:
        """A child is there, with nothing in it: the launched requests go to it, with what they have generated."""
        self._placement.child_ready()

    def child_died(self, reason: str) -> None:
        """The requests wait for the next child, but for the one that is guilty, if it is clear by now which that is."""
        if (guilty := self._placement.child_died()) is not None:
            what = f"{reason}, for the second time while request {guilty.request_id!r} ran alone"
            self.fail(guilty.key, EngineCrashedError(what))

    def fail(self, key: int, error: EngineError) -> None:
        """End one request that is not in the child: it was refused there, or never got so far."""
        if (request := self._live.get(key)) is not None:
            self._forget(request)
            self._fail(request, error)

    def fail_all(self, reason: str) -> None:
        """No child comes any more: every request ends with an EngineDeadError of its own, and nothing is left."""
        self._placement.child_died()
        for key in list(self._live):
            self.fail(key, EngineDeadError(reason))

    def _end(self, request: TrackedRequest) -> None:
        """End it without the child: as its output of an earlier run has ended, else cut off where it is."""
        self._forget(request)
        try:
            text, reason = request.last_words()
            request.sink.put(request.delta(text, (), reason))
        except Exception as exc:
            self._fail(request, exc)

    def _forget(self, request: TrackedRequest, *, ended_in_child: bool = False) -> None:
        del self._live[request.key]
        if not request.is_aborted:
            del self._keys_by_id[request.request_id]
        self._placement.leave(request, ended_in_child=ended_in_child)

    def _fail(self, request: TrackedRequest, cause: Exception) -> None:
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
