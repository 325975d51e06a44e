"""The tracker, one rule a test: what reaches a sink, and how a request ends."""

from __future__ import annotations

import pytest
from support.fake_engine import ListSink, admitted
from support.tracking import Setup

from inferq.engine.errors import (
    DuplicateRequestError,
    EngineOverloadedError,
)
from inferq.engine.pipe import Abort, Refused
from inferq.engine.request import Delta, FinishReason

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


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


def test_who_was_aborted_while_its_text_was_worked_out_keeps_nobody_out() -> None:
    setup = Setup(max_requests=1)
    sinks, keys = [ListSink() for _ in range(3)], [setup.tracker.new_key() for _ in range(3)]
    for key, sink in zip(keys, sinks, strict=True):
        setup.tracker.reserve(key, "a", sink, resumes=True)
        with pytest.raises(EngineOverloadedError, match=r"^1 requests are in the engine"):
            setup.add("b")
        setup.tracker.abort(key)
        assert len(setup.tracker) == 0
        assert not setup.tracker.idle, "it has yet to be told its end"
    other = setup.add("b")
    for key, sink in zip(keys, sinks, strict=True):
        setup.tracker.launch(key, admitted())
        assert sink.deltas == [Delta(0, 0, "", (), CANCELLED)]
    setup.step((setup.key("b"), "b", LENGTH))
    assert other.finish_reason is LENGTH
    assert setup.tracker.idle
