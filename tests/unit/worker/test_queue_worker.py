"""arq's hooks that the queue worker stands on, and its claim loop against a Redis that fails."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import arq.worker
import pytest
from redis.exceptions import ConnectionError
from support.waiting import wait_until

from inferq.engine.errors import EngineCrashedError, EngineDeadError
from inferq.producer import connect
from inferq.producer.contract import decode_json, encode_json
from inferq.worker.clock import RedisClock
from inferq.worker.commands import Claimed, DeadLetter, Outcome
from inferq.worker.errors import ShuttingDown
from inferq.worker.outbox import Outbox
from inferq.worker.queue import QueueWorker
from inferq.worker.settings import read_settings


def test_the_hooks_are_those_of_arq_0_28() -> None:
    """A version that moves one of them must not be installed unseen."""
    assert version("arq").startswith("0.28.")
    hooks = {
        "main": ["self"],
        "_poll_iteration": ["self"],
        "start_jobs": ["self", "job_ids"],
        "run_job": ["self", "job_id", "score"],
        "async_run": ["self"],
    }
    for name, parameters in hooks.items():
        method = getattr(arq.worker.Worker, name)
        assert inspect.iscoroutinefunction(method)
        assert list(inspect.signature(method).parameters) == parameters
    assert "self.main()" in inspect.getsource(arq.worker.Worker.async_run)


class ScriptedClaims:
    """Notes each claim, and answers it with what the test has put up: jobs, or an error."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answers: list[list[Claimed] | Exception] = []
        self.gate: asyncio.Event | None = None

    async def claim(self, **arguments: Any) -> list[Claimed]:
        self.calls.append({**arguments, "exclude": list(arguments["exclude"]), "at": time.monotonic()})
        answer = self.answers.pop(0) if self.answers else []
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Room:
    """Slots, and ten free blocks of ten tokens."""

    block_size = 10
    largest_request = 90
    is_open = True

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def free_blocks(self, uncounted_tokens: Iterable[int]) -> int:
        return 10 - sum(uncounted_tokens) // self.block_size


class ScriptedGeneration:
    """A request that ends when it is told to."""

    last: ScriptedGeneration

    def __init__(self, claimed: Claimed) -> None:
        ScriptedGeneration.last = self
        self.claimed = claimed
        self.token = claimed.token
        self.uncounted_tokens = 0
        self.end = asyncio.Event()
        self.error: Exception = RuntimeError("ended by the test")
        self.ways_out: list[Any] = []
        self.outbox = Outbox(
            request_id=claimed.request_id,
            token=claimed.token,
            generation=claimed.generation,
            epoch=claimed.epoch,
            max_unsent_tokens=1,
            on_pressure=lambda over: None,
            on_lost=lambda why: None,
            on_stuck=lambda reason: None,
        )

    async def run(self, request: Any) -> Any:
        await self.end.wait()
        raise self.error

    async def finish(self, event: Any, *, dead: Any = None) -> Outcome:
        self.ways_out.append((event, dead))
        return Outcome.OK

    async def hand_back(self) -> Outcome:
        self.ways_out.append("handed back")
        return Outcome.OK

    def interrupt(self, error: Exception) -> None:
        self.error = error
        self.end.set()


def job(request_id: str) -> Claimed:
    payload = encode_json({"t": None, "f": "generate", "a": [{}], "k": {}, "et": 1})
    return Claimed(request_id, "token", 1, 1, 1, payload, 0.0, None)


@asynccontextmanager
async def running(claims: ScriptedClaims, *flags: str, slots: int = 4) -> AsyncIterator[QueueWorker]:
    redis = connect("redis://localhost:1")  # never used: all commands are scripted
    clock = RedisClock()
    clock.measured(0.0, 0.0, (0, 0))
    settings = read_settings(["--poll-seconds", "0.05", "--lease-seconds", "0.5", *flags])
    worker = QueueWorker(
        settings,
        redis,
        claims,
        room=Room(slots),
        clock=clock,
        open_generation=ScriptedGeneration,  # type: ignore[arg-type]
    )
    loop = asyncio.create_task(worker.async_run())
    try:
        yield worker
    finally:
        worker.stop_picking()
        worker.interrupt_all(RuntimeError("the test is over"))
        await worker.wait_idle()
        await loop
        await redis.aclose()


async def test_the_worker_speaks_json_only_and_keeps_no_results() -> None:
    async with running(ScriptedClaims()) as worker:
        assert (worker.job_serializer, worker.job_deserializer) == (encode_json, decode_json)
        assert worker.keep_result_s == 0
        assert list(worker.functions) == ["generate"]
        assert worker.queue_name == "inferq:demo:queue"
        assert not worker.allow_abort_jobs


async def test_slots_are_what_is_left_and_what_runs_is_passed_by() -> None:
    claims = ScriptedClaims()
    claims.answers = [[job("a"), job("b"), job("c")]]
    async with running(claims, slots=3) as worker:
        await wait_until(lambda: len(claims.calls) > 1)
        assert claims.calls[0]["slots"] == 3
        # Without a free slot the claim still ends what lapsed or was cancelled.
        assert claims.calls[1]["slots"] == 0
        assert claims.calls[1]["exclude"] == ["a", "b", "c"]
        assert not worker.has_room.is_set()
        worker.generations["b"].end.set()  # type: ignore[attr-defined]
        await wait_until(lambda: claims.calls[-1]["slots"] == 1)
        assert claims.calls[-1]["exclude"] == ["a", "c"]
        assert worker.has_room.is_set()


async def test_a_claim_says_what_room_there_is() -> None:
    claims = ScriptedClaims()
    claims.answers = [[job("a"), job("b")]]
    async with running(claims, "--max-attempts", "7") as worker:
        await wait_until(lambda: len(claims.calls) > 1)
        first, second = claims.calls[:2]
        assert (first["free_blocks"], first["block_size"], first["running_here"]) == (10, 10, 0)
        assert first["largest_request"] == 90
        assert (second["free_blocks"], second["running_here"], second["max_attempts"]) == (10, 2, 7)
        worker.generations["a"].uncounted_tokens = 35  # type: ignore[misc]
        await wait_until(lambda: claims.calls[-1]["free_blocks"] == 7)


async def test_while_the_engine_starts_again_nothing_is_claimed() -> None:
    """But what was cancelled or has expired is still ended: the claim itself goes on."""
    claims = ScriptedClaims()
    async with running(claims) as worker:
        worker._room.is_open = False  # type: ignore[misc]
        await wait_until(lambda: claims.calls and claims.calls[-1]["slots"] == 0)
        worker._room.is_open = True  # type: ignore[misc]
        await wait_until(lambda: claims.calls[-1]["slots"] == 4)


@pytest.mark.parametrize("error", [ShuttingDown(), EngineDeadError("the GPU is gone")])
async def test_what_is_not_the_requests_fault_goes_back_to_the_queue(error: Exception) -> None:
    claims = ScriptedClaims()
    claims.answers = [[job("a")]]
    async with running(claims) as worker:
        generation: Any = await wait_until(lambda: worker.generations.get("a"))
        generation.interrupt(error)
        await wait_until(lambda: not worker.generations)
    assert generation.ways_out == ["handed back"]


async def test_a_request_that_killed_the_engine_leaves_a_dead_letter() -> None:
    claims = ScriptedClaims()
    claims.answers = [[job("a"), job("b")]]
    async with running(claims) as worker:
        guilty, other = [await wait_until(lambda n=name: worker.generations.get(n)) for name in "ab"]
        guilty.interrupt(EngineCrashedError("canary"))
        other.interrupt(RuntimeError("a bug"))
        await wait_until(lambda: not worker.generations)
    ((event, dead),) = guilty.ways_out
    assert (event.code, dead) == ("engine_crashed", DeadLetter("engine_crashed", 1))
    ((event, dead),) = other.ways_out
    assert (event.code, dead) == ("internal", None)


async def test_each_claim_has_a_token_of_its_own() -> None:
    claims = ScriptedClaims()
    async with running(claims):
        await wait_until(lambda: len(claims.calls) > 3)
    tokens = [call["token"] for call in claims.calls]
    assert len(set(tokens)) == len(tokens)


async def test_nothing_is_taken_over_for_one_lease_after_the_first_contact() -> None:
    claims = ScriptedClaims()
    async with running(claims):
        await wait_until(lambda: claims.calls and claims.calls[-1]["takeover"])
    # A lease that ended before that says nothing against its worker: its job's attempts stay as they are.
    assert all(abs(call["grace_end_ms"] - (claims.calls[0]["at"] + 0.5) * 1000) < 400 for call in claims.calls)
    first = next(call for call in claims.calls if call["takeover"])
    assert first["at"] >= claims.calls[0]["at"] + 0.5
    assert all(not call["takeover"] for call in claims.calls[: claims.calls.index(first)])


async def test_a_redis_error_ends_nothing_and_puts_off_takeovers() -> None:
    claims = ScriptedClaims()
    async with running(claims):
        await wait_until(lambda: claims.calls and claims.calls[-1]["takeover"])
        claims.answers = [ConnectionError("scripted"), OSError("scripted"), [job("a")]]
        await wait_until(lambda: not claims.answers)
        failed = len(claims.calls)
        await wait_until(lambda: len(claims.calls) > failed + 1)
        assert not claims.calls[failed]["takeover"]
        assert claims.calls[failed]["exclude"] == ["a"]
        await wait_until(lambda: claims.calls[-1]["takeover"])


async def test_calls_without_an_answer_are_named_until_one_has_an_answer() -> None:
    """What they may have taken is nobody else's, and costs no attempt."""
    claims = ScriptedClaims()
    claims.answers = [ConnectionError("scripted"), OSError("scripted"), [], [job("a")]]
    async with running(claims, slots=1) as worker:
        await wait_until(lambda: len(claims.calls) > 4)
        first, second = (call["token"] for call in claims.calls[:2])
        assert [call["lost_tokens"] for call in claims.calls[:4]] == [[], [first], [first, second], []]
        claims.answers = [ConnectionError("scripted")]
        await wait_until(lambda: not claims.answers)
        full = len(claims.calls)
        await wait_until(lambda: len(claims.calls) > full)
        assert claims.calls[full - 1]["slots"] == 0
        assert claims.calls[full]["lost_tokens"] == [], "a call without a free slot takes nothing"
        assert list(worker.generations) == ["a"]


async def test_a_ring_brings_a_claim_at_once() -> None:
    claims = ScriptedClaims()
    async with running(claims, "--poll-seconds", "60") as worker:
        await wait_until(lambda: len(claims.calls) == 1)
        worker.ring()
        await wait_until(lambda: len(claims.calls) == 2, timeout=10)


async def test_a_claim_under_way_at_the_stop_is_seen_through() -> None:
    """Its jobs are this worker's already: they run, and only then is it idle."""
    claims = ScriptedClaims()
    claims.gate = asyncio.Event()
    claims.answers = [[job("a")]]
    async with running(claims) as worker:
        await wait_until(lambda: claims.calls)
        worker.stop_picking()
        idle = asyncio.create_task(worker.wait_idle())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not idle.done()
        claims.gate.set()
        await wait_until(lambda: worker.generations)
        assert not idle.done()
        worker.interrupt_all(RuntimeError("stop"))
        await idle
        assert len(claims.calls) == 1


async def test_what_a_claim_under_way_brings_after_the_drain_goes_back_too() -> None:
    claims = ScriptedClaims()
    claims.gate = asyncio.Event()
    claims.answers = [[job("a")]]
    async with running(claims) as worker:
        await wait_until(lambda: claims.calls)
        worker.stop_picking()
        worker.interrupt_all(ShuttingDown())
        claims.gate.set()
        await worker.wait_idle()
        assert ScriptedGeneration.last.ways_out == ["handed back"]


@pytest.mark.parametrize("payload", [b"junk", encode_json({"t": None, "f": "no", "a": [], "k": {}, "et": 1})])
async def test_a_job_that_cannot_be_read_still_comes_to_its_end(payload: bytes) -> None:
    claims = ScriptedClaims()
    claims.answers = [[Claimed("a", "token", 1, 1, 1, payload, 0.0, None)]]
    async with running(claims) as worker:
        await wait_until(lambda: len(claims.calls) > 1)
        await worker.wait_idle()
        assert worker.generations == {}
        assert worker.tasks == {}
        assert worker.job_counter == 0
