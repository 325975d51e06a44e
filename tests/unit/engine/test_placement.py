"""Who runs and who waits, across the deaths of children: the rules one at a time."""

from __future__ import annotations

import pytest
from support.fake_engine import ListSink, MortalChild, admitted

from inferq.engine.errors import EngineCrashedError, EngineDeadError
from inferq.engine.pipe import Abort, Add, Pause, Resume, Stats
from inferq.engine.request import FinishReason
from inferq.engine.suspects import SAFE_TOKENS, Suspects
from inferq.engine.tracker import RequestTracker


class Lives:
    """A tracker and the children it gets, one after the other. `a` has key 1, `b` has key 2, and so on."""

    def __init__(self, requests: str = "", *, up: bool = True, looks_ahead: bool = False) -> None:
        self._looks_ahead = looks_ahead
        self.down = not up
        self.sinks: dict[str, ListSink] = {}
        self.tracker = RequestTracker(self._send, max_requests=99)
        if up:
            self.start()
        self.add(requests)

    def _send(self, message: object) -> None:
        assert not self.down
        self.child.inbox.append(message)  # type: ignore[arg-type]

    def add(self, requests: str) -> None:
        for request_id in requests:
            self.sinks[request_id] = ListSink()
            key = self.tracker.new_key()
            self.tracker.reserve(key, request_id, self.sinks[request_id])
            self.tracker.launch(key, admitted())

    def key(self, request_id: str) -> int:
        key = self.tracker.key_of(request_id)
        assert key is not None
        return key

    def start(self) -> None:
        self.child, self.down = MortalChild(set(), looks_ahead=self._looks_ahead), False
        self.tracker.child_ready()

    def die(self) -> None:
        self.down = True
        self.tracker.child_died("it died")

    def step(self, num_tokens: int = 1) -> str:
        """All that is on its way travels, then one step; returns who was in it."""
        self.settle()
        able = self.child.able()
        self.child.step(num_tokens)
        self.settle()
        return "".join(sorted(request_id for request_id in self.sinks if self._keys[request_id] in able))

    def settle(self) -> None:
        while self.child.inbox or self.child.outbox:
            self.child.apply()
            self.hear()

    def hear(self) -> None:
        """What the child has said arrives; it reads nothing."""
        while self.child.outbox:
            self.tracker.on_message(self.child.outbox.pop(0))

    @property
    def _keys(self) -> dict[str, int]:
        return {request_id: place for place, request_id in enumerate(self.sinks, 1)}

    def crashed(self) -> str:
        return "".join(
            request_id
            for request_id, sink in self.sinks.items()
            if any(isinstance(error, EngineCrashedError) for error in sink.errors)
        )


def test_the_next_child_gets_what_the_last_one_had_with_what_was_generated() -> None:
    lives = Lives("a")
    lives.step(3)
    lives.die()
    assert lives.sinks["a"].num_ends == 0, "a child's death is not a request's"
    lives.start()
    (message,) = lives.child.inbox
    assert isinstance(message, Add)
    assert (message.key, message.prompt_token_ids) == (lives.key("a"), [1, 2, 3])
    assert message.generated_token_ids == lives.sinks["a"].token_ids == MortalChild.answer(1)[:3]


def test_suspects_run_alone_in_their_order_until_each_is_cleared() -> None:
    lives = Lives("abc")
    lives.step()
    lives.die()
    lives.start()
    for alone in ("a", "a", "b", "b", "c", "c"):
        assert not lives.tracker.is_open
        assert lives.step(SAFE_TOKENS // 2) == alone
    assert lives.tracker.is_open
    assert lives.step() == "abc"
    for sink in lives.sinks.values():
        sink.check_contiguous()


def test_who_came_after_the_death_waits_and_is_no_suspect() -> None:
    lives = Lives("a")
    lives.step()
    lives.die()
    lives.add("b")
    lives.start()
    lives.add("c")
    assert lives.step(SAFE_TOKENS) == "a"
    assert lives.step() == "abc"


def test_a_request_that_is_alone_at_two_deaths_is_guilty_and_the_rest_go_on() -> None:
    lives = Lives("abc")
    lives.step()
    lives.die()
    lives.start()
    lives.step(SAFE_TOKENS)  # clears a
    assert lives.step() == "b"
    lives.die()
    assert lives.crashed() == ""
    lives.start()
    assert lives.step() == "b", "the one with a death against it is tried first"
    lives.die()
    assert lives.crashed() == "b"
    lives.start()
    assert lives.step(SAFE_TOKENS) == "c"
    assert lives.step() == "ac"


def test_one_death_alone_is_forgiven_after_enough_tokens() -> None:
    lives = Lives("a")
    for _ in range(2):
        lives.step()
        lives.die()
        lives.start()
        lives.step(SAFE_TOKENS)
    lives.die()
    assert lives.crashed() == ""


def test_deaths_while_nobody_runs_blame_nobody() -> None:
    lives = Lives()
    for _ in range(5):
        lives.die()
        lives.start()
    lives.die()
    lives.add("a")
    lives.tracker.pause(lives.key("a"))
    for _ in range(5):
        lives.start()
        lives.die()
    lives.tracker.resume(lives.key("a"))
    lives.start()
    assert lives.step() == "a"
    lives.die()
    assert lives.crashed() == ""


@pytest.mark.parametrize("how", ["pause", "abort"])
def test_who_may_still_be_in_the_step_counts_as_company(how: str) -> None:
    """What the child has not answered, it may not have read: its step may have the other one in it."""
    lives = Lives("ab")
    lives.step()
    getattr(lives.tracker, how)(lives.key("b"))
    lives.die()
    lives.start()
    assert lives.step() == "a"
    lives.die()
    assert lives.crashed() == "", "at the first death it had company"
    lives.start()
    assert lives.step() == "a"
    lives.die()
    assert lives.crashed() == "a"


def test_a_pause_that_the_child_has_confirmed_leaves_the_other_alone() -> None:
    lives = Lives("ab")
    lives.step()
    lives.tracker.pause(lives.key("b"))
    lives.settle()
    lives.die()
    lives.start()
    lives.step()
    lives.die()
    assert lives.crashed() == "a"


def test_a_trial_begins_when_the_child_has_said_that_nobody_else_runs() -> None:
    lives = Lives("ab")
    lives.step()
    lives.die()
    lives.start()
    lives.settle()
    lives.child.step(SAFE_TOKENS)
    lives.tracker.on_message(lives.child.outbox.pop())  # clears a
    assert [type(message) for message in lives.child.inbox] == [Pause]
    lives.child.apply()
    lives.tracker.on_message(lives.child.outbox.pop())
    assert [type(message) for message in lives.child.inbox] == [Add]
    assert lives.step(SAFE_TOKENS) == "b"
    assert lives.step() == "ab"


def test_a_trial_also_waits_for_an_aborted_request_to_be_let_go() -> None:
    lives = Lives("ab")
    lives.step()
    lives.die()
    lives.start()
    lives.settle()
    lives.tracker.abort(lives.key("a"))
    assert [type(message) for message in lives.child.inbox] == [Abort]
    assert lives.step() == "b"


def test_a_suspect_that_its_user_has_paused_holds_up_nobody_and_is_tried_when_it_is_resumed() -> None:
    lives = Lives("abc")
    lives.step()
    lives.tracker.pause(lives.key("a"))
    lives.die()  # the pause was not confirmed: a is a suspect too
    lives.start()
    assert lives.step(SAFE_TOKENS) == "b"
    assert lives.step(SAFE_TOKENS) == "c"
    assert lives.step() == "bc"
    lives.tracker.resume(lives.key("a"))
    assert lives.step(SAFE_TOKENS) == "a"
    assert lives.step() == "abc"


def test_a_pause_in_the_middle_of_a_trial_lets_the_next_one_go() -> None:
    lives = Lives("ab")
    lives.step()
    lives.die()
    lives.start()
    assert lives.step() == "a"
    lives.tracker.pause(lives.key("a"))
    assert lives.step(SAFE_TOKENS) == "b"
    assert lives.step() == "b"
    lives.tracker.resume(lives.key("a"))
    assert lives.step(SAFE_TOKENS - 1) == "a", "what it has generated in its first part counts"
    assert lives.step() == "ab"


def test_a_suspect_that_ends_makes_room_for_the_next() -> None:
    lives = Lives("ab")
    lives.step()
    lives.die()
    lives.start()
    lives.step(MortalChild.NUM_TOKENS)
    assert lives.sinks["a"].finish_reason is FinishReason.LENGTH
    assert lives.step() == "b"


def test_one_that_is_cleared_and_ends_before_its_pause_is_read_makes_room_too() -> None:
    """It is no suspect any more, and the child's answer to the pause is about a request that is gone."""
    lives = Lives("ab")
    lives.step()
    lives.die()
    lives.start()
    lives.settle()
    for _ in range(MortalChild.NUM_TOKENS // SAFE_TOKENS + 1):
        lives.child.step(SAFE_TOKENS)
        lives.hear()
    assert lives.sinks["a"].finish_reason is FinishReason.LENGTH
    assert lives.step() == "b"


def test_a_suspect_that_has_ended_is_alone_until_no_step_has_it() -> None:
    """The step on its way was planned before its end was known: who would begin meanwhile would be blamed for it."""
    lives = Lives("ab", looks_ahead=True)
    lives.step()
    lives.die()
    lives.start()
    lives.settle()
    lives.child.step(MortalChild.NUM_TOKENS)
    lives.settle()
    assert lives.sinks["a"].finish_reason is FinishReason.LENGTH
    assert lives.child.ending and not lives.child.running
    lives.die()
    for _ in range(2):
        assert lives.crashed() == ""
        lives.start()
        assert lives.step() == "b"
        lives.die()
    assert lives.crashed() == "b", "the two deaths at which it was alone"


def test_the_others_go_on_when_no_step_has_the_last_suspect() -> None:
    lives = Lives("a", looks_ahead=True)
    lives.step()
    lives.die()
    lives.add("b")
    lives.start()
    lives.step(MortalChild.NUM_TOKENS)
    assert lives.sinks["a"].finish_reason is FinishReason.LENGTH
    assert lives.step() == "", "this step has the last row of a"
    assert lives.step() == "b"


def test_the_others_wait_until_the_child_has_left_out_a_suspect_that_its_user_has_paused() -> None:
    lives = Lives("a")
    lives.step()
    lives.die()
    lives.add("b")
    lives.start()
    assert lives.step() == "a"
    lives.tracker.pause(lives.key("a"))
    assert [type(message) for message in lives.child.inbox] == [Pause]
    assert lives.step() == "b"


def test_who_has_just_ended_counts_as_company() -> None:
    """Also before there are suspects: the step on its way may have the one that has ended."""
    lives = Lives("ab", looks_ahead=True)
    lives.tracker.pause(lives.key("b"))
    lives.settle()
    lives.child.step(MortalChild.NUM_TOKENS)
    lives.tracker.resume(lives.key("b"))
    lives.settle()
    assert lives.sinks["a"].finish_reason is FinishReason.LENGTH
    for deaths in range(3):
        assert lives.crashed() == "", f"it was alone at {deaths} deaths less one"
        lives.die()
        lives.start()
        lives.step()
    assert lives.crashed() == "b"


def test_while_there_is_no_child_an_abort_ends_at_once_and_an_add_waits() -> None:
    lives = Lives("ab")
    lives.step()
    lives.die()
    freed: list[Stats | None] = []
    lives.tracker.when_freed("a", freed.append)
    assert lives.tracker.abort(lives.key("a"))
    assert lives.sinks["a"].finish_reason is FinishReason.CANCELLED
    assert freed == [None]
    lives.add("c")
    lives.tracker.abort(lives.key("b"))
    lives.start()
    assert lives.step() == "c"


def test_who_was_on_the_way_out_is_gone_with_the_child() -> None:
    lives = Lives("a")
    lives.step()
    freed: list[Stats | None] = []
    lives.tracker.when_freed("a", freed.append)
    lives.tracker.abort(lives.key("a"))
    assert freed == []
    lives.die()
    assert freed == [None]
    lives.start()
    assert lives.tracker.idle
    assert lives.tracker.stats is None


@pytest.mark.parametrize("when", ["before the death", "while it is down"])
def test_a_paused_request_stays_paused_across_a_death(when: str) -> None:
    lives = Lives("a")
    lives.step()
    if when == "before the death":
        lives.tracker.pause(lives.key("a"))
        lives.settle()
        lives.die()
    else:
        lives.die()
        lives.tracker.pause(lives.key("a"))
    lives.start()
    assert lives.child.inbox == []
    lives.tracker.resume(lives.key("a"))
    assert lives.step() == "a"


def test_a_pause_and_its_resume_while_there_is_no_child_come_to_nothing() -> None:
    lives = Lives("a")
    lives.step()
    lives.die()
    lives.tracker.pause(lives.key("a"))
    lives.tracker.resume(lives.key("a"))
    lives.start()
    assert [type(message) for message in lives.child.inbox] == [Add]


def test_answers_to_two_pauses_are_told_apart() -> None:
    """The answer to the first pause says nothing about the second, which the child has not read."""
    lives = Lives("ab")
    lives.step()
    key = lives.key("b")
    lives.tracker.pause(key)
    lives.child.apply()
    lives.tracker.resume(key)
    lives.tracker.pause(key)
    lives.tracker.on_message(lives.child.outbox.pop())
    assert [type(message) for message in lives.child.inbox] == [Resume, Pause]
    lives.die()  # b may have been in the step
    lives.start()
    assert lives.step() == "a"
    lives.die()
    assert lives.crashed() == ""


def test_no_child_any_more_ends_everybody() -> None:
    lives = Lives("ab")
    lives.step()
    lives.die()
    lives.tracker.fail_all("for good")
    assert [type(error) for sink in lives.sinks.values() for error in sink.errors] == [EngineDeadError] * 2
    assert lives.tracker.idle


# ---- the rule by itself ----


def test_nobody_is_a_suspect_before_a_death() -> None:
    suspects = Suspects()
    assert not suspects
    assert suspects.next(lambda key: True) is None
    assert not suspects.credit(1, 100)
    assert not suspects.forget(1)


def test_a_death_sets_back_what_a_suspect_has_generated() -> None:
    suspects = Suspects()
    suspects.accuse([1, 2], alone=False)
    assert not suspects.credit(1, SAFE_TOKENS - 1)
    suspects.accuse([1], alone=True)
    assert not suspects.credit(1, SAFE_TOKENS - 1)
    assert suspects.credit(1, 1)
    assert 1 not in suspects and 2 in suspects


def test_two_deaths_alone_need_not_follow_each_other() -> None:
    suspects = Suspects()
    assert suspects.accuse([1], alone=True) is None
    assert suspects.accuse([1, 2], alone=False) is None
    assert suspects.next(lambda key: True) == 1
    assert suspects.next(lambda key: key != 1) == 2
    assert suspects.accuse([1], alone=True) == 1
    assert 1 not in suspects
