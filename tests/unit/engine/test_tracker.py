"""The tracker's rules, one at a time."""

from __future__ import annotations

import pytest
from support.fake_engine import ChildModel, ListSink, admitted

from inferq.engine.errors import (
    DuplicateRequestError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestFailedError,
)
from inferq.engine.pipe import Abort, Add, Down, Freed, Pause, Refused, Resume, Stats, Step
from inferq.engine.request import Delta, FinishReason
from inferq.engine.tracker import PausedBy, RequestTracker

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


class Setup:
    def __init__(self, max_requests: int = 8) -> None:
        self.child = ChildModel()
        self.tracker = RequestTracker(self.child.send, max_requests=max_requests)
        self.tracker.child_ready()

    def add(self, request_id: str, sink: ListSink | None = None, *, stop: str = "", fail_at: str = "") -> ListSink:
        sink = sink or ListSink()
        key = self.tracker.new_key()
        self.tracker.reserve(key, request_id, sink)
        self.tracker.launch(key, admitted(stop, fail_at))
        return sink

    def key(self, request_id: str) -> int:
        key = self.tracker.key_of(request_id)
        assert key is not None
        return key

    def step(self, *outputs: tuple[int, str, FinishReason | None]) -> None:
        for answer in self.child.drain():
            self.tracker.on_message(answer)
        self.tracker.on_step(self.child.step(list(outputs)))

    def settle(self) -> None:
        for answer in self.child.drain():
            self.tracker.on_message(answer)


def test_deltas_reach_the_sink_as_they_come() -> None:
    setup = Setup()
    sink = setup.add("a")
    key = setup.key("a")
    setup.step((key, "he", None))
    setup.step((key, "y", LENGTH))
    assert sink.deltas == [
        Delta(0, 0, "h", (ord("h"), ord("e"))),
        Delta(2, 1, "ey", (ord("y"),), LENGTH),
    ]
    assert setup.tracker.idle


def test_tokens_are_delivered_at_once_while_their_text_is_held_back() -> None:
    setup = Setup()
    sink = setup.add("a")
    setup.step((setup.key("a"), "h", None))
    assert sink.deltas == [Delta(0, 0, "", (ord("h"),))]


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_child() -> None:
    setup = Setup()
    sink = setup.add("a", stop="#")
    key = setup.key("a")
    setup.step((key, "ab#cd", None))
    assert (sink.text, sink.token_ids, sink.finish_reason) == ("ab", [ord(c) for c in "ab#"], STOP)
    assert setup.child.inbox == [Abort(key)]
    setup.tracker.on_step(setup.child.step([(key, "xyz", LENGTH)]))  # was on its way
    assert sink.token_ids == [ord(c) for c in "ab#"], "later tokens are dropped"
    assert sink.num_ends == 1
    setup.settle()
    assert setup.tracker.idle


def test_a_stop_string_in_the_last_step_needs_no_abort() -> None:
    setup = Setup()
    sink = setup.add("a", stop="#")
    setup.step((setup.key("a"), "a#", LENGTH))
    assert sink.finish_reason is STOP
    assert setup.child.inbox == []
    assert setup.tracker.idle


def test_abort_sends_the_held_text_and_cancelled() -> None:
    setup = Setup()
    sink = setup.add("a")
    key = setup.key("a")
    setup.step((key, "ab", None))
    assert setup.tracker.abort(key) is True
    assert sink.deltas[-1] == Delta(2, 1, "b", (), CANCELLED)
    assert setup.tracker.abort(key) is False
    assert setup.child.inbox == [Abort(key)]


def test_abort_before_launch_tells_the_child_nothing() -> None:
    setup = Setup()
    sink = ListSink()
    key = setup.tracker.new_key()
    setup.tracker.reserve(key, "a", sink)
    assert setup.tracker.abort(key)
    setup.tracker.launch(key, admitted())
    assert sink.deltas == [Delta(0, 0, "", (), CANCELLED)]
    assert setup.child.inbox == []
    assert setup.tracker.idle


def test_a_released_reservation_tells_nobody() -> None:
    setup = Setup()
    sink = ListSink()
    key = setup.tracker.new_key()
    setup.tracker.reserve(key, "a", sink)
    setup.tracker.release(key)
    assert sink.num_ends == 0
    assert setup.tracker.idle
    setup.add("a")
    setup.tracker.release(setup.key("a"))
    assert setup.tracker.key_of("a") is not None, "a launched request has its own ends"


def test_an_id_is_free_at_once_and_what_was_on_its_way_hits_nobody() -> None:
    setup = Setup()
    setup.add("a")
    old = setup.key("a")
    setup.tracker.abort(old)
    new_sink = setup.add("a")
    new = setup.key("a")
    assert new != old
    setup.tracker.on_step(setup.child.step([(old, "old", LENGTH)]))
    setup.tracker.on_refused(Refused(old, "late", True))
    setup.settle()
    assert new_sink.deltas == []
    setup.step((new, "new", LENGTH))
    assert (new_sink.text, new_sink.num_ends) == ("new", 1)


def test_the_same_id_twice_is_refused_and_the_first_goes_on() -> None:
    setup = Setup()
    first = setup.add("a")
    with pytest.raises(DuplicateRequestError, match="'a'"):
        setup.add("a")
    setup.step((setup.key("a"), "ok", LENGTH))
    assert first.text == "ok"


def test_the_number_of_requests_is_bounded() -> None:
    setup = Setup(max_requests=2)
    setup.add("a")
    setup.add("b")
    with pytest.raises(EngineOverloadedError, match="max_num_seqs \\+ max_waiting is 2"):
        setup.add("c")
    setup.tracker.abort(setup.key("a"))
    setup.add("c")


@pytest.mark.parametrize(("invalid", "error"), [(True, InvalidRequestError), (False, RequestFailedError)])
def test_a_refusal_fails_that_request_alone(invalid: bool, error: type[Exception]) -> None:
    setup = Setup()
    bad, good = setup.add("bad"), setup.add("good")
    setup.tracker.on_refused(Refused(setup.key("bad"), "no room", invalid))
    assert [type(e) for e in bad.errors] == [error]
    assert str(bad.errors[0]) == "no room"
    setup.step((setup.key("good"), "ok", LENGTH))
    assert good.text == "ok"


def test_a_broken_detokenizer_ends_its_request_alone_and_aborts_it_in_the_child() -> None:
    setup = Setup()
    bad, good = setup.add("bad", fail_at="!"), setup.add("good")
    bad_key = setup.key("bad")
    setup.step((bad_key, "a!", None), (setup.key("good"), "ok", LENGTH))
    assert [type(e) for e in bad.errors] == [RequestFailedError]
    assert isinstance(bad.errors[0].__cause__, ValueError)
    assert good.text == "ok"
    assert setup.child.inbox == [Abort(bad_key)]
    setup.settle()
    assert setup.tracker.idle


@pytest.mark.parametrize("reason", [None, LENGTH])
@pytest.mark.parametrize("fail_error", [None, RuntimeError("and its fail too")])
def test_a_sink_that_raises_ends_its_request_alone(reason: FinishReason | None, fail_error: Exception | None) -> None:
    setup = Setup()
    bad = setup.add("bad", ListSink(put_error=RuntimeError("full"), fail_error=fail_error))
    good = setup.add("good")
    key = setup.key("bad")
    setup.step((key, "ab", reason), (setup.key("good"), "ok", LENGTH))
    assert [type(e) for e in bad.errors] == [RequestFailedError]
    assert good.text == "ok"
    assert setup.child.inbox == ([Abort(key)] if reason is None else [])
    setup.settle()
    assert setup.tracker.idle


def test_a_sink_may_abort_its_own_request_from_put() -> None:
    setup = Setup()

    class Impatient(ListSink):
        def put(self, delta: Delta) -> None:
            super().put(delta)
            if len(self.deltas) == 1:
                setup.tracker.abort(key)

    sink = setup.add("a", Impatient())
    key = setup.key("a")
    setup.step((key, "ab", None))
    assert [d.finish_reason for d in sink.deltas] == [None, CANCELLED]
    sink.check_contiguous()
    setup.settle()
    assert setup.tracker.idle


def test_a_sink_may_add_the_next_request_from_its_end() -> None:
    setup = Setup(max_requests=1)
    following = ListSink()

    class Chained(ListSink):
        def put(self, delta: Delta) -> None:
            super().put(delta)
            if delta.finish_reason is not None:
                setup.add("a", following)

    setup.add("a", Chained())
    setup.step((setup.key("a"), "x", LENGTH))
    setup.step((setup.key("a"), "y", LENGTH))
    assert following.text == "y"


def test_an_abort_of_a_request_that_finishes_in_the_same_step() -> None:
    """The first one's output makes its sink abort the second, whose own end is in the same message."""
    setup = Setup()

    class AbortsTheOther(ListSink):
        def put(self, delta: Delta) -> None:
            super().put(delta)
            setup.tracker.abort(other_key)

    first, other = setup.add("first", AbortsTheOther()), setup.add("other")
    other_key = setup.key("other")
    setup.step((setup.key("first"), "a", LENGTH), (other_key, "b", LENGTH))
    assert (first.text, first.finish_reason) == ("a", LENGTH)
    assert [d.finish_reason for d in other.deltas] == [CANCELLED]
    setup.settle()
    assert setup.tracker.idle


def test_fail_all_ends_every_request_with_an_error_of_its_own() -> None:
    setup = Setup()
    freed: list[Stats | None] = []
    launched = setup.add("a")
    reserved = ListSink()
    setup.tracker.reserve(setup.tracker.new_key(), "b", reserved)
    setup.add("c")
    setup.tracker.when_freed("c", freed.append)
    setup.tracker.abort(setup.key("c"))
    setup.tracker.fail_all("it died")
    for sink in (launched, reserved):
        assert [type(e) for e in sink.errors] == [EngineDeadError]
        assert str(sink.errors[0]) == "it died"
    assert launched.errors[0] is not reserved.errors[0]
    assert freed == [None]
    assert setup.tracker.idle


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
    setup.step((setup.key("a"), "x", LENGTH))
    assert freed == ["a"]
    setup.tracker.on_refused(Refused(setup.key("b"), "no", True))
    assert freed == ["a", "b"]
    key = setup.tracker.new_key()
    setup.tracker.reserve(key, "d", ListSink())
    setup.tracker.when_freed("d", lambda _: freed.append("d"))
    setup.tracker.abort(key)
    assert freed == ["a", "b", "d"]


@pytest.mark.parametrize("outputs", [[[1]], [[1, [2], "no such reason"]], ["xy"], [[[1], [2], None]], [7]])
def test_what_is_no_steps_output_is_not_taken_for_one(outputs: list[object]) -> None:
    setup = Setup()
    with pytest.raises((ValueError, TypeError)):
        setup.tracker.on_step(Step(outputs, setup.child.stats()))  # type: ignore[arg-type]


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
