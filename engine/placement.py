"""Who is in the child, and who may take part in its steps: what is said down the pipe about requests is said here.

A child that has died is forgotten, and everybody is placed anew when the next one is there, each with what it has
generated. While there are suspects, the one whose turn it is runs alone; it starts when the child has said that nobody
else can be in a step, be it only with its last row. Knows nothing of text and sinks; standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from .errors import EngineError, EngineOverloadedError
from .pipe import Abort, Down, Freed, Pause, Paused, Resume, Stats, Step
from .suspects import Suspects
from .tracked import Place, TrackedRequest


class Placement:
    """The launched requests that have not ended, and those that the child has yet to let go of.

    `send` takes messages for the child, and may raise an EngineError for an Add alone. `fail` ends a request that can
    never be sent again.
    """

    def __init__(self, send: Callable[[Down], None], fail: Callable[[int, EngineError], None]) -> None:
        self._send = send
        self._fail = fail
        self._up = False
        self._requests: dict[int, TrackedRequest] = {}
        self._leaving: dict[int, TrackedRequest] = {}  #: ended; the child has not said yet that no step has it
        self._suspects = Suspects()
        self._put_off = False  #: somebody waits until the child has read more of what it was sent
        self._turn: int | None = None  #: the suspect that runs alone, or will when the others have stopped
        self.stats: Stats | None = None  #: the child's counters as last heard

    def __repr__(self) -> str:
        return f"<Placement up={self._up} in={len(self._requests)} leaving={len(self._leaving)}>"

    @property
    def is_open(self) -> bool:
        """False while there is no child, and while it works for one suspect alone."""
        return self._up and self._turn is None

    @property
    def idle(self) -> bool:
        return not (self._requests or self._leaving or self._suspects)

    def leaving(self, request_id: str) -> TrackedRequest | None:
        """The newest request of that id which the child has yet to let go of."""
        return next((r for r in reversed(self._leaving.values()) if r.request_id == request_id), None)

    # ---- requests ----

    def enter(self, request: TrackedRequest) -> None:
        """Raises what sending it raises; it has not entered then."""
        self._requests[request.key] = request
        try:
            self._arrange(request, must_send=True)
        except BaseException:
            del self._requests[request.key]
            raise

    def update(self, request: TrackedRequest) -> None:
        """It was paused or resumed."""
        if request.key in self._requests:
            self._arrange(request)

    def credit(self, request: TrackedRequest, num_tokens: int) -> None:
        """The child has generated tokens for it."""
        if self._suspects and self._suspects.credit(request.key, num_tokens):
            self._arrange()

    def leave(self, request: TrackedRequest, *, ended_in_child: bool) -> None:
        """It has ended: in the child too, or there it is aborted. A step on its way may have it all the same."""
        self._requests.pop(request.key, None)
        if request.place is Place.OUT:
            self._let_go(request, self.stats)
            return
        self._leaving[request.key] = request
        if not ended_in_child:
            self._send(Abort(request.key))
        self._look_again()

    # ---- the child ----

    def on_step(self, step: Step) -> None:
        self.stats = step.stats
        if self._put_off:
            self._arrange()

    def on_freed(self, freed: Freed) -> None:
        self.stats = freed.stats
        if (request := self._leaving.pop(freed.key, None)) is not None:
            self._let_go(request, freed.stats)

    def on_refused(self, key: int) -> None:
        """The child has never had it in a step. It is about to leave."""
        if (request := self._requests.get(key)) is not None:
            request.place = Place.OUT

    def on_paused(self, paused: Paused) -> None:
        if (request := self._requests.get(paused.key)) is not None:
            request.unanswered_pauses -= 1
            self._look_again()

    def child_ready(self) -> None:
        """A new child is there, and has none of the requests."""
        self._up = True
        self._arrange()

    def child_died(self) -> TrackedRequest | None:
        """Nobody is in a child any more. Returns the request that is guilty of it, if one is by now."""
        self._up = False
        self.stats = None
        leaving, self._leaving = self._leaving, {}
        for key in leaving:
            self._suspects.forget(key)
        present = [request.key for request in self._requests.values() if request.may_be_in_a_step]
        guilty = self._suspects.accuse(present, alone=len(present) == 1 and not leaving)
        for request in self._requests.values():
            request.place, request.unanswered_pauses = Place.OUT, 0
        for request in leaving.values():
            request.tell_freed(None)
        return None if guilty is None else self._requests[guilty]

    # ---- inside ----

    def _arrange(self, changed: TrackedRequest | None = None, *, must_send: bool = False) -> None:
        """Hold whoever must not run, then let run whoever may.

        Where nobody is suspected `changed` is the only one that is looked at. What sending that one raises is passed on
        if it `must_send`. Whom else the pipe has no room for is put off until the child's next word about a request.
        """
        if not self._up:
            return
        self._turn = turn = self._suspects.next(lambda key: key in self._requests and not self._requests[key].paused)
        requests = list(self._requests.values()) if changed is None or self._suspects else [changed]
        for request in requests:
            if request.place is Place.RUNNING and (request.paused or turn not in (None, request.key)):
                request.place = Place.HELD
                request.unanswered_pauses += 1
                self._send(Pause(request.key))
        self._put_off = self._put_off and changed is not None
        unsent: list[tuple[int, EngineError]] = []
        for request in requests:
            if request.place is not Place.RUNNING and not request.paused and self._may_run(request.key, turn):
                try:
                    self._let_run(request)
                except EngineError as exc:
                    if must_send and request is changed:
                        raise
                    unsent.append((request.key, exc))
        # After the loop: whoever ends may have others end, and has the rest arranged anew.
        self._put_off |= any(isinstance(error, EngineOverloadedError) for _, error in unsent)
        for key, error in unsent:
            if not isinstance(error, EngineOverloadedError):
                self._fail(key, error)

    def _let_run(self, request: TrackedRequest) -> None:
        self._send(Resume(request.key) if request.place is Place.HELD else request.message())
        request.place = Place.RUNNING

    def _may_run(self, key: int, turn: int | None) -> bool:
        """A suspect runs when nobody else can be in a step any more, and the others when no suspect can."""
        if turn is None:
            return not any(map(self._may_be_in_a_step, self._suspects))
        others = chain(self._requests, self._leaving)
        return key == turn and not any(self._may_be_in_a_step(other) for other in others if other != key)

    def _may_be_in_a_step(self, key: int) -> bool:
        return key in self._leaving or self._requests[key].may_be_in_a_step

    def _let_go(self, request: TrackedRequest, stats: Stats | None) -> None:
        """An ended request can be in no step any more."""
        was_suspect = self._suspects.forget(request.key)
        request.tell_freed(stats)
        if was_suspect:
            self._arrange()
        else:
            self._look_again()

    def _look_again(self) -> None:
        """Perhaps nobody else is in a step any more, or the pipe has room."""
        if self._suspects or self._put_off:
            self._arrange()
