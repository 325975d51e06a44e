"""Who the pipe has no room for waits until there is some, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fake_engine import ListSink, admitted

from inferq.engine.errors import EngineError, EngineOverloadedError, InvalidRequestError
from inferq.engine.pipe import Add, Down, Freed, Pause, Paused, Refused, Resume, Stats, Step
from inferq.engine.suspects import SAFE_TOKENS
from inferq.engine.tracker import PausedBy, RequestTracker

STATS = Stats(1, 1, 0, 1, 9, 0)


class FullPipe:
    """A tracker over a pipe with room for so many Adds. `a` has key 1, `b` has key 2, and so on."""

    def __init__(self, requests: str, *, room: int) -> None:
        self.room = 99
        self.refuse: dict[int, EngineError] = {}
        self.sent: list[Down] = []
        self.sinks = {request_id: ListSink() for request_id in requests}
        self.tracker = RequestTracker(self._send, max_requests=99)
        for key, (request_id, sink) in enumerate(self.sinks.items(), 1):
            assert self.tracker.new_key() == key
            self.tracker.reserve(key, request_id, sink)
            self.tracker.launch(key, admitted())  # there is no child yet
        self.room = room

    def _send(self, message: Down) -> None:
        if isinstance(message, Add):
            if (error := self.refuse.get(message.key)) is not None:
                raise error
            if not self.room:
                raise EngineOverloadedError("full")
            self.room -= 1
        self.sent.append(message)

    def added(self) -> list[int]:
        added = [message.key for message in self.sent if isinstance(message, Add)]
        self.sent.clear()
        return added


def test_whom_a_new_child_cannot_be_sent_yet_it_gets_after_its_next_step() -> None:
    pipe = FullPipe("abc", room=1)
    pipe.tracker.child_ready()
    assert pipe.added() == [1]
    pipe.tracker.on_message(Step([[1, [65], None]], STATS))
    assert pipe.added() == [], "there is no room yet"
    pipe.room = 9
    pipe.tracker.on_message(Step([[1, [65], None]], STATS))
    assert pipe.added() == [2, 3]
    pipe.tracker.on_message(Step([[1, [65], None]], STATS))
    assert pipe.added() == []
    assert not any(sink.num_ends for sink in pipe.sinks.values())


def abort(pipe: FullPipe) -> None:
    pipe.tracker.abort(1)
    pipe.room = 9
    pipe.tracker.on_message(Freed(1, STATS))


def pause(pipe: FullPipe) -> None:
    pipe.tracker.pause(1)
    pipe.room = 9
    pipe.tracker.on_message(Paused(1))


def refusal(pipe: FullPipe) -> None:
    pipe.room = 9
    pipe.tracker.on_message(Refused(1, "no", True))


@pytest.mark.parametrize("answer", [abort, pause, refusal])
def test_whatever_the_child_says_instead_of_a_step_lets_them_go_too(answer: Callable[[FullPipe], None]) -> None:
    """With the only request in the child gone or held, there may never be another step."""
    pipe = FullPipe("abc", room=1)
    pipe.tracker.child_ready()
    answer(pipe)
    assert pipe.added() == [1, 2, 3]


def test_who_is_paused_by_reader_or_user_waits_for_both_and_not_for_room() -> None:
    pipe = FullPipe("ab", room=9)
    pipe.tracker.pause(1, PausedBy.READER)
    pipe.tracker.pause(1, PausedBy.USER)
    pipe.tracker.child_ready()
    assert pipe.added() == [2]
    pipe.room = 0
    pipe.tracker.resume(1, PausedBy.USER)
    assert not pipe.tracker.child_died("it died") and not pipe.sent
    pipe.tracker.child_ready()
    assert pipe.sent == [], "b has no room, and the reader of a is still behind"
    pipe.tracker.resume(1, PausedBy.READER)
    assert pipe.sent == [] and not pipe.sinks["a"].num_ends, "a resume is no moment to fail in"


def test_a_suspect_that_ends_lets_those_go_that_had_no_room() -> None:
    pipe = FullPipe("abc", room=9)
    pipe.tracker.child_ready()
    pipe.tracker.pause(2)
    pipe.tracker.pause(3)
    pipe.tracker.on_message(Paused(2))
    pipe.tracker.on_message(Paused(3))
    pipe.tracker.child_died("it died")
    pipe.tracker.resume(2)
    pipe.tracker.resume(3)
    pipe.sent.clear()
    pipe.room = 1
    pipe.tracker.child_ready()
    assert pipe.added() == [1], "the suspect, alone"
    pipe.tracker.on_message(Step([[1, [65] * SAFE_TOKENS, None]], STATS))
    assert pipe.added() == []
    pipe.room = 9
    pipe.tracker.abort(1)
    pipe.tracker.on_message(Freed(1, STATS))
    assert pipe.added() == [2, 3]


def test_who_can_never_be_sent_again_ends_alone() -> None:
    """With what it has generated it is too long for a frame, even where its sink then ends others."""
    pipe = FullPipe("abcd", room=9)
    pipe.refuse[2] = InvalidRequestError("the prompt is too long")

    def end_another(error: EngineError) -> None:
        pipe.tracker.abort(3)

    pipe.sinks["b"].fail = end_another  # type: ignore[method-assign]
    pipe.tracker.child_ready()
    pipe.tracker.on_message(Freed(3, STATS))
    assert pipe.added() == [1, 3, 4]
    assert [len(pipe.sinks[request_id].deltas) for request_id in "acd"] == [0, 1, 0]
    pipe.tracker.abort(1)
    pipe.tracker.abort(4)
    for key in (1, 4):
        pipe.tracker.on_message(Freed(key, STATS))
    assert pipe.tracker.idle


def test_a_held_request_goes_on_although_there_is_no_room_for_new_ones() -> None:
    pipe = FullPipe("ab", room=1)
    pipe.tracker.child_ready()
    pipe.tracker.pause(1)
    pipe.tracker.resume(1)
    assert [type(message) for message in pipe.sent] == [Add, Pause, Resume]
