"""What the tracker says to the child about a request, and when the child holds nothing of it any more."""

from __future__ import annotations

import pytest
from support.fake_engine import ChildModel, ListSink, admitted
from support.tracking import Setup

from inferq.engine.errors import (
    EngineOverloadedError,
)
from inferq.engine.pipe import Add, Down, Freed, Pause, Refused, Resume, Stats, Step
from inferq.engine.request import FinishReason
from inferq.engine.tracker import PausedBy, RequestTracker

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


def test_pause_and_resume_are_said_once() -> None:
    setup = Setup()
    setup.add("a")
    key = setup.key("a")
    setup.child.inbox.clear()
    for method in (setup.tracker.pause, setup.tracker.pause, setup.tracker.resume, setup.tracker.resume):
        method(key)
    assert setup.child.inbox == [Pause(key), Resume(key)]
    setup.tracker.abort(key)
    setup.child.inbox.clear()
    setup.tracker.pause(key)
    setup.tracker.resume(key)
    assert setup.child.inbox == []


def test_a_pause_before_launch_holds_after_it() -> None:
    setup = Setup()
    key = setup.tracker.new_key()
    setup.tracker.reserve(key, "a", ListSink())
    setup.tracker.pause(key)
    assert setup.child.inbox == []
    setup.tracker.launch(key, admitted())
    assert setup.child.inbox == []
    setup.tracker.resume(key)
    assert [type(m) for m in setup.child.inbox] == [Add]


def test_freed_tells_the_childs_counters_after_an_abort() -> None:
    setup = Setup()
    freed: list[Stats | None] = []
    setup.add("a")
    setup.add("b")
    setup.settle()
    key = setup.key("a")
    setup.tracker.when_freed("a", freed.append)  # asked while it lives
    setup.tracker.abort(key)
    setup.tracker.when_freed("a", freed.append)  # and while the child has not answered
    assert freed == []
    setup.settle()
    assert [stats and stats.used_blocks for stats in freed] == [1, 1]
    setup.tracker.when_freed("a", freed.append)  # and when all is over
    assert len(freed) == 3


def test_freed_is_told_for_a_request_that_ends_by_itself_or_is_refused_or_never_launched() -> None:
    setup = Setup()
    freed: list[str] = []
    for request_id in "abc":
        setup.add(request_id)
        setup.tracker.when_freed(request_id, lambda _, name=request_id: freed.append(name))
    setup.tracker.on_step(setup.child.step([(setup.key("a"), "x", LENGTH)]))
    assert freed == [], "the step on its way may have it all the same"
    setup.tracker.on_message(setup.child.ends.pop())
    assert freed == ["a"]
    setup.tracker.on_refused(Refused(setup.key("b"), "no", True))
    assert freed == ["a", "b"]
    key = setup.tracker.new_key()
    setup.tracker.reserve(key, "d", ListSink())
    setup.tracker.when_freed("d", lambda _: freed.append("d"))
    setup.tracker.abort(key)
    assert freed == ["a", "b", "d"]


def test_freed_for_an_unknown_key_is_harmless() -> None:
    setup = Setup()
    setup.tracker.on_message(Freed(99, setup.child.stats()))
    assert setup.tracker.stats is not None


def test_a_request_that_cannot_be_sent_is_not_left_behind() -> None:
    child = ChildModel()

    def send(message: Down) -> None:
        if isinstance(message, Add):
            raise EngineOverloadedError("full")
        child.send(message)

    tracker = RequestTracker(send, max_requests=1)
    tracker.child_ready()
    for _ in range(3):
        key = tracker.new_key()
        tracker.reserve(key, "a", ListSink())
        with pytest.raises(EngineOverloadedError, match="full"):
            tracker.launch(key, admitted())
        tracker.release(key)
        assert tracker.idle
    assert not child.inbox


def test_a_request_goes_on_when_neither_user_nor_reader_has_it_paused() -> None:
    setup = Setup()
    setup.add("a")
    key, tracker, inbox = setup.key("a"), setup.tracker, setup.child.inbox
    inbox.clear()
    tracker.pause(key, PausedBy.READER)
    tracker.pause(key)
    tracker.pause(key)
    assert inbox == [Pause(key)]
    tracker.resume(key)
    tracker.resume(key)
    assert inbox == [Pause(key)], "the reader is still behind"
    tracker.pause(key)
    tracker.resume(key, PausedBy.READER)
    assert inbox == [Pause(key)], "the user still has it paused"
    tracker.resume(key)
    assert inbox == [Pause(key), Resume(key)]


def test_a_new_child_is_given_no_more_than_it_reads() -> None:
    """Who had no room in the pipe after a restart follows when the child has come on, and nobody ends for it."""
    child, room = ChildModel(), 2
    sinks = {name: ListSink() for name in "abc"}

    def send(message: Down) -> None:
        nonlocal room
        if isinstance(message, Add):
            if not room:
                raise EngineOverloadedError("full")
            room -= 1
        child.send(message)

    tracker = RequestTracker(send, max_requests=3)
    for name, sink in sinks.items():
        key = tracker.new_key()
        tracker.reserve(key, name, sink)
        tracker.launch(key, admitted())
    tracker.child_ready()
    assert [message.key for message in child.inbox] == [1, 2]
    tracker.on_step(Step([], child.stats()))
    assert len(child.inbox) == 2
    room = 1
    tracker.on_step(Step([], child.stats()))
    assert [message.key for message in child.inbox] == [1, 2, 3]
    assert all(not sink.num_ends for sink in sinks.values())
