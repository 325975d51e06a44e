"""What goes wrong with one request, or in its sink, ends that one alone."""

from __future__ import annotations

import pytest
from support.fake_engine import ListSink
from support.tracking import Setup

from inferq.engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)
from inferq.engine.pipe import Abort, Refused, Stats, Step
from inferq.engine.request import Delta, FinishReason

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


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


@pytest.mark.parametrize("outputs", [[[1]], [[1, [2], "no such reason"]], ["xy"], [[[1], [2], None]], [7]])
def test_what_is_no_steps_output_is_not_taken_for_one(outputs: list[object]) -> None:
    setup = Setup()
    with pytest.raises((ValueError, TypeError)):
        setup.tracker.on_step(Step(outputs, setup.child.stats()))
