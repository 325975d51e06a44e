"""Random deaths, steps, aborts and pauses: one end a request, no token twice or lost, blame where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_engine import ListSink, MortalChild, admitted

from inferq.engine.errors import EngineCrashedError
from inferq.engine.pipe import Freed, Paused, Step
from inferq.engine.request import FinishReason
from inferq.engine.suspects import GUILTY_DEATHS
from inferq.engine.tracker import RequestTracker

IDS = st.sampled_from("abcdef")
PICK = st.randoms(use_true_random=False)


def _left_out(said: Sequence[Step | Freed | Paused]) -> set[int]:
    """Whom the child has said that it has left out of steps."""
    ended = {key for message in said if isinstance(message, Step) for key, _, reason in message.outputs if reason}
    return ended | {message.key for message in said if isinstance(message, Paused)}


class RestartMachine(RuleBasedStateMachine):
    """A child that dies with a poison in its step, or for no reason; nothing travels unless a rule lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = RequestTracker(self._send, max_requests=6)
        self.child: MortalChild | None = None
        self.sinks: dict[int, ListSink] = {}
        self.poisons: set[int] = set()
        self.paused: set[int] = set()
        self.deaths_alone: dict[int, int] = {}
        self.steps_per_read = 1
        self.looks_ahead = False

    @initialize(steps_per_read=st.sampled_from([1, 30]), looks_ahead=st.booleans())
    def choose(self, steps_per_read: int, looks_ahead: bool) -> None:
        """How late the child reads, once nothing disturbs it."""
        self.steps_per_read, self.looks_ahead = steps_per_read, looks_ahead

    def _send(self, message: Any) -> None:
        assert self.child is not None, "something was sent down a pipe that leads nowhere"
        self.child.inbox.append(message)

    def _die(self, lost: bool) -> None:
        """Who was in its step, or on the way there, is the child's to know; what it said last may be lost with it."""
        assert self.child is not None
        child = self.child
        for message in [] if lost else child.outbox:
            self.tracker.on_message(message)  # what is said to the child meanwhile reaches nobody
        coming = {message.key for message in child.inbox if message.kind in ("add", "resume")}
        in_flight = child.able() | child.ending | coming
        for key in in_flight | (_left_out(child.outbox) if lost else set()):
            if in_flight <= {key}:
                self.deaths_alone[key] = self.deaths_alone.get(key, 0) + 1
        self.child = None
        self.tracker.child_died("it died")

    # ---- users ----

    @rule(request_id=IDS, poison=st.booleans())
    def add(self, request_id: str, poison: bool) -> None:
        if self.tracker.key_of(request_id) is not None:
            return
        key = self.tracker.new_key()
        self.sinks[key] = ListSink()
        if poison:
            self.poisons.add(key)
        self.tracker.reserve(key, request_id, self.sinks[key])
        self.tracker.launch(key, admitted())

    @rule(request_id=IDS)
    def abort(self, request_id: str) -> None:
        if (key := self.tracker.key_of(request_id)) is not None:
            self.tracker.abort(key)
            assert self.sinks[key].finish_reason is FinishReason.CANCELLED, "an abort ends a request at once"

    @rule(request_id=IDS, resume=st.booleans())
    def pause_or_resume(self, request_id: str, resume: bool) -> None:
        if (key := self.tracker.key_of(request_id)) is not None:
            if resume:
                self.tracker.resume(key)
                self.paused.discard(key)
            else:
                self.tracker.pause(key)
                self.paused.add(key)

    # ---- the child ----

    @precondition(lambda self: self.child is None)
    @rule()
    def start(self) -> None:
        self.child = MortalChild(self.poisons, looks_ahead=self.looks_ahead)
        self.tracker.child_ready()

    @precondition(lambda self: self.child is not None)
    @rule(pick=PICK)
    def read(self, pick: Any) -> None:
        """The child drains its inbox, but not what is on its way."""
        assert self.child is not None
        self.child.apply(pick.randint(1, 1 + len(self.child.inbox)))

    @precondition(lambda self: self.child is not None)
    @rule(num_tokens=st.sampled_from([1, 12, 40]), lost=st.booleans())
    def step(self, num_tokens: int, lost: bool) -> None:
        assert self.child is not None
        if not self.child.step(num_tokens):
            self._die(lost)

    @precondition(lambda self: self.child is not None)
    @rule(pick=PICK)
    def hear(self, pick: Any) -> None:
        assert self.child is not None
        for _ in range(pick.randint(1, 1 + len(self.child.outbox))):
            if self.child.outbox:
                self.tracker.on_message(self.child.outbox.pop(0))

    @precondition(lambda self: self.child is not None)
    @rule(lost=st.booleans())
    def kill(self, lost: bool) -> None:
        self._die(lost)

    # ---- what holds ----

    @invariant()
    def each_request_has_its_own_tokens_in_order_and_one_end_at_most(self) -> None:
        for key, sink in self.sinks.items():
            sink.check_contiguous()
            assert sink.token_ids == MortalChild.answer(key)[: len(sink.token_ids)]
            assert sink.num_ends <= 1

    @invariant()
    def only_a_request_that_was_alone_at_two_deaths_is_blamed(self) -> None:
        for key, sink in self.sinks.items():
            if sink.errors:
                assert isinstance(sink.errors[0], EngineCrashedError)
                assert self.deaths_alone.get(key, 0) >= GUILTY_DEATHS

    @invariant()
    def a_request_lives_until_its_sink_is_told(self) -> None:
        assert len(self.tracker) == sum(not sink.num_ends for sink in self.sinks.values())

    def teardown(self) -> None:
        """Undisturbed from here on: every innocent finishes, every poison is found, and nothing is left."""
        innocent = self._live() - self.poisons
        self._run_dry(lambda: len(self.tracker) == len(self.paused & self._live()))
        for key in self._live():
            self.tracker.resume(key)
        self._run_dry(lambda: self.tracker.idle)
        for key, sink in self.sinks.items():
            assert sink.num_ends == 1
            if key in innocent:
                assert sink.token_ids == MortalChild.answer(key)
                assert sink.finish_reason is FinishReason.LENGTH
        assert self.tracker.idle
        assert self.child is None or not self.child.running

    def _live(self) -> set[int]:
        return {key for request_id in "abcdef" if (key := self.tracker.key_of(request_id)) is not None}

    def _run_dry(self, done: Callable[[], bool]) -> None:
        for _ in range(2000):
            if done():
                return
            if self.child is None:
                self.start()
            assert self.child is not None
            # Some steps are over before the child has read what they have set off.
            for _ in range(self.steps_per_read):
                if self.child is not None and not self.child.step(4):
                    self._die(lost=True)
                self._hear_all()
            if self.child is not None:
                self.child.apply()
            self._hear_all()
        raise AssertionError(f"requests are stuck: {self.tracker!r}")

    def _hear_all(self) -> None:
        while self.child is not None and self.child.outbox:
            self.tracker.on_message(self.child.outbox.pop(0))


RestartMachine.TestCase.settings = settings(stateful_step_count=60)
TestRestartMachine = RestartMachine.TestCase
