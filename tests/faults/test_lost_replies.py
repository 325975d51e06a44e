"""Connections break before a command is executed, or after it and before its reply is there, again and again."""

from __future__ import annotations

import pytest
from support.cutting_proxy import cutting_proxy
from support.disturbed import MODEL, Answers, Disturbance, Fleet, fault

from inferq.producer import InferenceClient

#: Some dozens of cuts a run, each of which costs a pause of a tenth of a second or less.
ONE_IN = 12


@pytest.mark.timeout(600)
@fault
@pytest.mark.parametrize("readers_too", [False, True], ids=["worker", "worker-and-readers"])
@pytest.mark.parametrize("seed", range(2))
async def test_a_reply_that_is_lost_changes_no_answer(
    seed: int, readers_too: bool, steady: Fleet, answers: Answers
) -> None:
    """Of claims, publications, renewals and ends: none is done twice, and none is taken for not done."""
    async with cutting_proxy(steady.url, one_in=ONE_IN, seed=f"{seed} {readers_too}") as proxy:
        worker = await steady.only("--redis-url", proxy.url)
        url = proxy.url if readers_too else steady.url
        async with InferenceClient.from_url(url, model=MODEL) as producer:
            streams = Disturbance(steady, producer)
            await streams.begin(num_waiting=40)
            proxy.armed = True
            await streams.ended()
            proxy.armed = False
            await streams.check(answers, worker)
            assert {attempt for attempt, _ in await streams.starts()} == {1}
        await steady.retire()
    assert proxy.lost_replies["evalsha"] > 0 and proxy.lost_commands["evalsha"] > 0
    assert "worker.broke" not in worker.log
