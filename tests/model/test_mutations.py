"""Each fault that is planted in the model breaks a property; without it the same world is right."""

from __future__ import annotations

import pytest

from model import properties as p
from model.explore import explore
from model.mutations import Mutation as M
from model.sizes import SIZES

#: Where each of them shows, and by what.
CAUGHT = {
    M.NO_COMPARE: ("the server fails over", p.TOKENS),
    M.NO_OWNER_IN_PUBLISH: ("a worker sleeps", p.FENCED),
    M.NO_OWNER_IN_FINISH: ("a worker sleeps", p.FENCED),
    M.NO_OWNER_IN_HANDBACK: ("a worker drains and sleeps", p.FENCED),
    M.REPEAT_IS_APPENDED: ("a reply is lost", p.IDS_GROW),
    M.RETRY_WITH_OTHER_BYTES: ("a reply is lost, the server fails over", p.READER),
    M.FINISH_LEAVES_RUNNING: ("a worker dies", p.CONSISTENT),
    M.FINISH_LEAVES_CANCEL: ("a worker dies", p.CANCEL_KEY),
    M.SAME_EPOCH: ("the server fails over", p.READER),
    M.COUNTED_EPOCHS: ("the server fails over", p.READER),
    M.ANY_EPOCH: ("a worker drains and sleeps", p.DROPPED),
    M.ANY_JOB: ("it loses the job", p.DROPPED),
    M.REACQUIRE_LEAVES_QUEUE: ("the server fails over", p.CONSISTENT),
    M.REACQUIRE_THE_DEAD: ("it loses the job", p.DROPPED),
    M.REACQUIRE_THE_LEASED: ("a worker sleeps", p.DROPPED),
    M.BACK_LEAVES_LEASE: ("a worker drains", p.CONSISTENT),
    M.BACK_COSTS_AN_ATTEMPT: ("a worker drains", p.CHARGED),
    M.BACK_FORGETS_CANCEL: ("a worker drains", p.NOT_STARTED),
    M.TOKENS_FROM_ZERO: ("a worker dies", p.TOKENS),
    M.OWNER_TRUSTS_ITSELF: ("its clock goes back, two tokens", p.HAS_ALL),
    M.GOES_ON_BEHIND_THE_END: ("its clock goes back, a worker dies", p.TOKENS),
    M.NO_TAKEOVER: ("a worker dies", p.END_IN_REACH),
    M.CLAIM_IGNORES_CANCEL: ("a worker dies", p.NOT_STARTED),
    M.CLAIM_TAKES_LEASED: ("a worker dies", p.LEFT_ALONE),
    M.GRACE_COSTS: ("a worker dies", p.CHARGED),
    M.GRACE_FOR_EVER: ("workers die", p.CHARGED),
    M.LOSSES_ARE_FREE: ("a worker dies", p.CHARGED),
    M.CANCEL_THE_DEAD: ("a worker dies", p.CANCEL_KEY),
    M.CANCEL_ENDS_LEASED: ("a worker dies", p.LEFT_ALONE),
    M.EXPIRE_ENDS_LEASED: ("a worker dies", p.LEFT_ALONE),
    M.READER_IGNORES_EPOCHS: ("it loses the job", p.READER),
    M.READER_YIELDS_WHOLE: ("the server fails over", p.READER),
    M.READER_SKIPS_PARTS: ("the server fails over", p.READER),
    M.READER_NEVER_LOOKS: ("its clock goes back", p.END_IN_REACH),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", M, ids=lambda mutation: mutation.name.lower())
def test_a_planted_fault_is_found(mutation: M) -> None:
    name, violated = CAUGHT[mutation]
    search = explore(SIZES[name].config, frozenset({mutation}))
    assert search.violated == violated, search
    assert search.trace, "a violation comes with the way to it"


def test_each_of_those_worlds_is_searched_without_a_fault_too() -> None:
    assert {name for name, _ in CAUGHT.values()} <= SIZES.keys()
