"""What Redis refuses: the log names the reason, and what no waiting will change ends the part."""

from __future__ import annotations

import pytest
import structlog
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from structlog.testing import capture_logs

from inferq.worker import background
from inferq.worker.background import Outage, every, is_away, is_hopeless, reason_of
from inferq.worker.errors import RedisRefuses

CANARY = "canary-7d1f"
AWAY = [
    ConnectionError("x"),
    TimeoutError("x"),
    OSError("x"),
    ReadOnlyError("x"),
    BusyLoadingError("x"),
    ResponseError("CLUSTERDOWN Hash slot not served"),
]
#: States that somebody may mend, whatever the worker does.
PASSING = [
    OutOfMemoryError("x"),
    ResponseError("MISCONF Errors writing to the AOF file"),
    ResponseError("NOREPLICAS Not enough good replicas to write."),
]
HOPELESS = [
    NoPermissionError("User w has no permissions to run the 'blpop' command"),
    ResponseError("ACL failure in script: User w has no permissions to run the 'xadd' command"),
    AuthenticationError("invalid username-password pair or user is disabled."),
    ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
    ResponseError("unknown command 'EVALSHA'"),
]


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.0)
    structlog.reset_defaults()


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_a_server_that_is_away_is_waited_for(error: Exception) -> None:
    outage = Outage("part")
    with capture_logs() as lines:
        for _ in range(100):
            outage.failed(error)
    assert is_away(error)
    assert not outage.is_stuck
    assert [(line["event"], line["log_level"]) for line in lines] == [("redis.lost", "warning")]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_state_of_the_server_is_named_and_waited_out(error: Exception) -> None:
    outage = Outage("part")
    with capture_logs() as lines:
        for _ in range(100):
            outage.failed(error)
    assert not is_hopeless(error)
    assert outage.is_stuck
    assert [(line["event"], line["reason"]) for line in lines] == [("redis.refuses", reason_of(error))]


@pytest.mark.parametrize("error", HOPELESS, ids=repr)
async def test_what_no_waiting_will_change_ends_the_part(error: Exception) -> None:
    async def action() -> None:
        raise error

    with capture_logs() as lines, pytest.raises(RedisRefuses) as caught:
        await every(0.001, action, role="part")
    assert (caught.value.role, caught.value.reason) == ("part", reason_of(error))
    assert lines[0]["event"] == "redis.refuses"


@pytest.mark.parametrize("error", HOPELESS, ids=repr)
def test_a_part_that_is_not_vital_goes_on(error: Exception) -> None:
    outage = Outage("part", vital=False)
    assert all(outage.failed(error) > 0 for _ in range(10))


def test_patience_begins_again_after_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 3600.0)
    outage = Outage("part")
    outage.failed(HOPELESS[0])
    outage.failed(ConnectionError("x"))
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.0)
    assert not outage.is_stuck
    outage.failed(PASSING[0])
    assert outage.is_stuck
    outage.over()
    assert not outage.is_stuck


def test_a_reason_that_lasts_or_changes_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage("part")
    with capture_logs() as lines:
        for error in (ConnectionError("x"), PASSING[1], PASSING[1], PASSING[2]):
            outage.failed(error)
        monkeypatch.setattr(background, "_SAY_AGAIN_SECONDS", 0.0)
        outage.failed(PASSING[2])
    assert [line.get("reason") for line in lines] == [None, "MISCONF", "NOREPLICAS", "NOREPLICAS"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HOPELESS[0], "NOPERM User w has no permissions to run the 'blpop' command"),
        (HOPELESS[1], "NOPERM ACL failure in script: User w has no permissions to run the 'xadd' command"),
        (HOPELESS[3], "WRONGTYPE"),
        (ResponseError(f"unknown command, with args beginning with: {CANARY}"), "ResponseError"),
        (ResponseError(f"MISCONF {CANARY}"), "MISCONF"),
        (OutOfMemoryError(CANARY), "OutOfMemoryError"),
    ],
)
def test_a_reason_quotes_nothing_of_a_job(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
