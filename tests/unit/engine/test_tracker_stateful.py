"""Random requests, aborts, steps, refusals and deaths: each sink gets one end, and nothing is left."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fake_engine import ChildModel, ListSink, admitted

from inferq.engine.errors import DuplicateRequestError, EngineOverloadedError
from inferq.engine.pipe import Freed, Paused, Refused
from inferq.engine.request import FinishReason
from inferq.engine.tracker import RequestTracker

IDS = st.sampled_from("abcde")
MAX_REQUESTS = 4
PICK = st.randoms(use_true_random=False)


class TrackerMachine(RuleBasedStateMachine):
    """The child lags behind: what it says and what it is told travel when a rule lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.child = ChildModel()
        self.tracker = RequestTracker(self.child.send, max_requests=MAX_REQUESTS)
        self.tracker.child_ready()
        self.sinks: list[ListSink] = []
        self.live: dict[str, ListSink] = {}
        self.reserved: dict[int, str] = {}
        self.keys: set[int] = set()
        self.on_their_way: list[Freed | Paused] = []
        self.sent: dict[int, str] = {}

    def _drop_ended(self) -> None:
        self.live = {request_id: sink for request_id, sink in self.live.items() if not sink.num_ends}

    def _reserve(self, request_id: str, raises: bool) -> int | None:
        sink = ListSink(put_error=RuntimeError("full") if raises else None)
        key = self.tracker.new_key()
        assert key not in self.keys
        self.keys.add(key)
        try:
            self.tracker.reserve(key, request_id, sink)
        except DuplicateRequestError:
            assert request_id in self.live
            return None
        except EngineOverloadedError:
            assert len(self.live) == MAX_REQUESTS
            return None
        assert request_id not in self.live
        self.sinks.append(sink)
        self.live[request_id] = sink
        return key

    @rule(request_id=IDS, stop=st.sampled_from(["", "#"]), fail_at=st.sampled_from(["", "!"]), raises=st.booleans())
    def add(self, request_id: str, stop: str, fail_at: str, raises: bool) -> None:
        if (key := self._reserve(request_id, raises)) is not None:
            self.tracker.launch(key, admitted(stop, fail_at))

    @rule(request_id=IDS)
    def reserve(self, request_id: str) -> None:
        if (key := self._reserve(request_id, raises=False)) is not None:
            self.reserved[key] = request_id

    @precondition(lambda self: self.reserved)
    @rule(pick=PICK)
    def launch(self, pick: object) -> None:
        key = pick.choice(sorted(self.reserved))  # type: ignore[attr-defined]
        del self.reserved[key]
        self.tracker.launch(key, admitted())

    @rule(request_id=IDS)
    def abort(self, request_id: str) -> None:
        key = self.tracker.key_of(request_id)
        assert (key is not None) == (request_id in self.live)
        if key is not None:
            assert self.tracker.abort(key)
            assert not self.tracker.abort(key)
            self._drop_ended()
            assert request_id not in self.live

    @rule(request_id=IDS, resume=st.booleans())
    def pause_or_resume(self, request_id: str, resume: bool) -> None:
        if (key := self.tracker.key_of(request_id)) is not None:
            (self.tracker.resume if resume else self.tracker.pause)(key)

    @rule()
    def child_reads_its_inbox(self) -> None:
        self.on_their_way += self.child.drain()

    @rule()
    def answers_arrive(self) -> None:
        for answer in self.on_their_way:
            self.tracker.on_message(answer)
        self.on_their_way.clear()

    @precondition(lambda self: self.child.running)
    @rule(
        pick=PICK,
        text=st.text(alphabet="ab#!", min_size=1, max_size=4),
        reasons=st.lists(st.sampled_from([None, None, *FinishReason]), min_size=4, max_size=4),
    )
    def step(self, pick: object, text: str, reasons: list[FinishReason | None]) -> None:
        able = sorted(self.child.running - self.child.paused)
        chosen = pick.sample(able, min(len(able), 4))  # type: ignore[attr-defined]
        self.tracker.on_step(
            self.child.step([(key, text, reason) for key, reason in zip(chosen, reasons, strict=False)])
        )
        self._drop_ended()

    @precondition(lambda self: self.child.running)
    @rule(pick=PICK, invalid=st.booleans())
    def refuse(self, pick: object, invalid: bool) -> None:
        key = pick.choice(sorted(self.child.running))  # type: ignore[attr-defined]
        self.child.forget(key)
        self.tracker.on_refused(Refused(key, "no", invalid))
        self._drop_ended()

    @invariant()
    def each_sink_has_one_end_at_most_and_no_gap(self) -> None:
        for sink in self.sinks:
            sink.check_contiguous()
            # A sink that raises from its last put is told once more, by fail.
            assert sink.num_ends <= (2 if sink.put_error else 1)
            ended = [d.finish_reason is not None for d in sink.deltas]
            assert not any(ended[:-1]), "nothing follows an end"

    @invariant()
    def the_maps_agree_with_the_sinks(self) -> None:
        assert len(self.tracker) == len(self.live) <= MAX_REQUESTS
        assert all(self.tracker.key_of(request_id) is not None for request_id in self.live)

    def teardown(self) -> None:
        for request_id in list(self.live)[::2]:
            key = self.tracker.key_of(request_id)
            assert key is not None
            self.tracker.abort(key)
        self.child_reads_its_inbox()
        self.answers_arrive()
        if self.child.running:
            self.tracker.on_step(self.child.step([(key, "z", FinishReason.LENGTH) for key in list(self.child.running)]))
            self._drop_ended()
            self.child_reads_its_inbox()
            self.answers_arrive()
        if len(self.tracker):
            self.tracker.fail_all("the end")
        assert all(sink.num_ends >= 1 for sink in self.sinks), "every sink has an end"
        assert self.tracker.idle
        assert not self.child.running


TrackerMachine.TestCase.settings = settings(stateful_step_count=40)
TestTrackerMachine = TrackerMachine.TestCase
