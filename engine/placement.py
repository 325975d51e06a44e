"""Who is in the child, and who may take part in its steps: what is said down the pipe about requests is said here.

A child that has died is forgotten, and everybody is placed anew when the next one is there, each with what it has
generated. While there are suspects, the one whose turn it is runs alone; it starts when the child has said that nobody
else can be in a step. Knows nothing of text and sinks; standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from .pipe import Abort, Down, Freed, Pause, Paused, Resume, Stats
from .suspects import Suspects
from .tracked import Place, TrackedRequest


class Placement:
    """The launched requests that have not ended, and those that the child has yet to let go of.

    `send` takes messages for the child, and must not raise.
    """

    def __init__(self, send: Callable[[Down], None]) -> None:
        self._send = send
        self._up = False
        self._requests: dict[int, TrackedRequest] = {}
        self._leaving: dict[int, TrackedRequest] = {}  #: ended here; the child has not said yet that it knows
        self._suspects = Suspects()
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
        self._requests[request.key] = request
        self._arrange(request)

    def update(self, request: TrackedRequest) -> None:
        """Its user has paused or resumed it."""
        if request.key in self._requests:
            self._arrange(request)

    def credit(self, request: TrackedRequest, num_tokens: int) -> None:
        """The child has generated tokens for it."""
        if self._suspects and self._suspects.credit(request.key, num_tokens):
            self._arrange()

    def leave(self, request: TrackedRequest, *, ended_in_child: bool) -> None:
        """It has ended: in the child too, or there it is aborted."""
        self._requests.pop(request.key, None)
        if ended_in_child or request.place is Place.OUT:
            request.tell_freed(self.stats)
        else:
            self._leaving[request.key] = request
            self._send(Abort(request.key))
        if self._suspects.forget(request.key):
            self._arrange()

    # ---- the child ----

    def on_freed(self, freed: Freed) -> None:
        self.stats = freed.stats
        if (request := self._leaving.pop(freed.key, None)) is not None:
            request.tell_freed(freed.stats)
            self._look_for_quiet()

    def on_paused(self, paused: Paused) -> None:
        if (request := self._requests.get(paused.key)) is not None:
            request.unanswered_pauses -= 1
            self._look_for_quiet()

    def child_ready(self) -> None:
        """A new child is there, and has none of the requests."""
        self._up = True
        self._arrange()

    def child_died(self) -> TrackedRequest | None:
        """Nobody is in a child any more. Returns the request that is guilty of it, if one is by now."""
        self._up = False
        self.stats = None
        leaving, self._leaving = self._leaving, {}
        present = [request.key for request in self._requests.values() if request.may_be_in_a_step]
        guilty = self._suspects.accuse(present, alone=len(present) == 1 and not leaving)
        for request in self._requests.values():
            request.place, request.unanswered_pauses = Place.OUT, 0
        for request in leaving.values():
            request.tell_freed(None)
        return None if guilty is None else self._requests[guilty]

    # ---- inside ----

    def _arrange(self, changed: TrackedRequest | None = None) -> None:
        """Hold whoever must not run, then let run whoever may. One alone can have changed where nobody is suspected."""
        if not self._up:
            return
        self._turn = turn = self._suspects.next(lambda key: not self._requests[key].paused)
        requests = list(self._requests.values()) if changed is None or self._suspects else [changed]
        for request in requests:
            if request.place is Place.RUNNING and (request.paused or turn not in (None, request.key)):
                request.place = Place.HELD
                request.unanswered_pauses += 1
                self._send(Pause(request.key))
        for request in requests:
            if request.place is not Place.RUNNING and not request.paused and self._may_run(request.key, turn):
                self._send(request.message() if request.place is Place.OUT else Resume(request.key))
                request.place = Place.RUNNING

    def _may_run(self, key: int, turn: int | None) -> bool:
        return turn is None or (key == turn and self._is_quiet_but_for(key))

    def _is_quiet_but_for(self, key: int) -> bool:
        others = (request for request in self._requests.values() if request.key != key)
        return not any(chain(self._leaving, (request.may_be_in_a_step for request in others)))

    def _look_for_quiet(self) -> None:
        if self._suspects:
            self._arrange()
