"""Renewals, and what they bring: cancellations and losses for the requests that were asked about, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from inferq.worker.commands import Renewed
from inferq.worker.leases import Leases


class Request:
    def __init__(self, token: str) -> None:
        self.token = token
        self.said: list[str] = []

    def cancel(self) -> None:
        self.said.append("cancel")

    def lose(self, why: str) -> None:
        self.said.append("lose")


class Renewals:
    def __init__(self, answer: Renewed) -> None:
        self.answer = answer
        self.asked: list[list[tuple[str, str]]] = []
        self.meanwhile = lambda: None

    async def renew(self, owned: Sequence[tuple[str, str]], *, lease_ms: int) -> Renewed:
        self.asked.append(list(owned))
        self.meanwhile()
        return self.answer


async def test_all_are_renewed_by_one_call_and_told_what_came_of_it() -> None:
    running = {name: Request(f"t{name}") for name in "abc"}
    renewals = Renewals(Renewed(cancelled=["b"], lost=["c"]))
    await Leases(renewals, running, 1000).renew()
    assert renewals.asked == [[("a", "ta"), ("b", "tb"), ("c", "tc")]]
    assert [request.said for request in running.values()] == [[], ["cancel"], ["lose"]]


async def test_a_doorbell_asks_for_what_runs_here_only() -> None:
    running = {"a": Request("ta")}
    renewals = Renewals(Renewed(cancelled=["a"], lost=[]))
    leases = Leases(renewals, running, 1000)
    await leases.renew(["elsewhere"])
    assert renewals.asked == []
    await leases.renew(["a", "elsewhere"])
    assert renewals.asked == [[("a", "ta")]]
    assert running["a"].said == ["cancel"]


async def test_nothing_runs_nothing_is_asked() -> None:
    renewals = Renewals(Renewed([], []))
    await Leases(renewals, {}, 1000).renew()
    assert renewals.asked == []


async def test_a_late_answer_never_hits_a_later_request_of_the_same_id() -> None:
    old, new = Request("old"), Request("new")
    running = {"a": old}
    renewals = Renewals(Renewed(cancelled=[], lost=["a"]))
    renewals.meanwhile = lambda: running.update(a=new)
    await Leases(renewals, running, 1000).renew()
    assert (old.said, new.said) == (["lose"], [])
