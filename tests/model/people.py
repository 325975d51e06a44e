"""The real owners and readers of a walk, each beside its counterpart in the model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from support.wire import Wire

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.errors import JobLost, RequestReplaced
from inferq.producer.events import Finished, FinishReason
from inferq.producer.position import START, Position
from inferq.producer.reader import StreamReader
from inferq.worker.commands import Claimed, Entry, Outcome
from inferq.worker.outbox import Hold, Outbox
from inferq.worker.progress import read_progress
from model import owner as owners
from model import reader as readers
from model import state as m
from model.actions import Config, Step
from model.server import Names

LEASE_MS = 600_000


@dataclass
class Real:
    """An owner: its outbox, and the entries of a finish that has no answer yet."""

    claimed: Claimed | None  #: None while it does not know what its claim took
    token: str
    outbox: Outbox | None = None
    closing: list[Entry] = field(default_factory=list)


class Owners:
    def __init__(self, wire: Wire, ids: list[str], names: list[Names], config: Config) -> None:
        self._wire = wire
        self._ids = ids
        self._names = names
        self._config = config
        self._tokens = itertools.count(1)
        self._real: dict[tuple[int, int], Real] = {}
        self._late: dict[int, list[Entry]] = {}

    def crash(self, who: int) -> None:
        self._real = {place: real for place, real in self._real.items() if place[1] != who}

    def connections_are_lost(self) -> None:
        self._late.clear()

    async def do(self, step: Step, action: str) -> object:
        how = step.name.partition(", ")[2]
        if action == "late":
            return await self._send(self._late.pop(step.number))
        if action in ("claim", "claim in grace", "take back"):
            return await self._claim(step, action, how)
        real = self._real[step.number, step.who]
        if action == "forget the claim":
            del self._real[step.number, step.who]
            return None
        assert real.outbox is not None
        if real.outbox.hold is Hold.LOST:
            real.closing = []
        if action in ("publish", "finish"):
            return await self._write(step, action, real, real.outbox, how)
        if action in ("hand back", "return"):
            return await self._hand_back(step, action, real, real.outbox, how)
        if action in ("reacquire", "drop"):
            return await self._reacquire(step, real.outbox, how)
        return await self._remember(step, action, real.outbox)

    async def _claim(self, step: Step, action: str, how: str) -> object:
        request_id, names = self._ids[step.number], self._names[step.number]
        before = self._real.pop((step.number, step.who), None)
        token = f"token-{next(self._tokens)}"
        claimed = await self._wire.claim(
            worker=f"worker-{step.who}",
            token=token,
            lease_ms=LEASE_MS,
            lost_tokens=[before.token] if before else [],
            grace_end_ms=2 if action == "claim in grace" else 0,
            max_attempts=self._config.limits.max_attempts,
            exclude=set(self._ids) - {request_id},
        )
        if not claimed:
            return None
        (job,) = claimed
        after = step.after.job
        names.tokens[token] = after.lease
        assert (job.request_id, job.attempt) == (request_id, after.attempts + 1)
        assert job.resumed_tokens == (after.stream[-1].index,)
        assert job.resumed is (after.stream[-2].kind != m.QUEUED)
        assert job.generation == (await self._generation(request_id))
        real = Real(job, token)
        real.outbox = None if how else _outbox(job)
        if how != "late":
            self._real[step.number, step.who] = real
        return m.STARTED

    async def _generation(self, request_id: str) -> int:
        return int(await self._wire.redis.hget(self._wire.keys.job(request_id), "generation"))

    async def _write(self, step: Step, action: str, real: Real, outbox: Outbox, how: str) -> object:
        if action == "finish" and not real.closing:
            kind = owners.to_finish(_owner(step), self._config.tokens)[-1].kind
            real.closing = outbox.conclude(Finished(finish_reasons=(FinishReason(kind),)))
        entries = real.closing if action == "finish" else [outbox.freeze()]
        if how in ("request lost", "under way"):
            outbox.answer_lost()
            if how == "under way":
                self._late[step.number] = list(entries)
            return None
        outcome = await self._send(entries)
        if how == "reply lost":
            outbox.answer_lost()
        elif action == "publish":
            outbox.answer(entries[0], outcome)
        elif outcome is Outcome.OK:
            self._drop(step)
        else:
            outbox.lose(outcome)
        return outcome

    async def _send(self, entries: list[Entry]) -> Outcome:
        if entries[-1].type in ("finished", "failed"):
            return await self._wire.worker.finish(*entries)
        (outcome,) = await self._wire.publish(*entries)
        return outcome

    async def _hand_back(self, step: Step, action: str, real: Real, outbox: Outbox, how: str) -> object:
        if how == "request lost":
            return None
        expected = outbox.last_id if action == "hand back" else f"{outbox.epoch}-0"
        outcome = await self._wire.worker.hand_back(outbox.request_id, token=outbox.token, expected_id=expected)
        if not how:
            if action == "return" or outcome is Outcome.OK:
                self._drop(step)
            else:
                outbox.lose(outcome.value)
        return outcome

    async def _reacquire(self, step: Step, outbox: Outbox, how: str) -> object:
        got = await self._wire.worker.reacquire(
            outbox.request_id,
            token=outbox.token,
            generation=outbox.generation,
            epoch=outbox.epoch,
            worker=f"worker-{step.who}",
            lease_ms=LEASE_MS,
        )
        if got is None:
            self._drop(step)
            return None
        assert got.resumed_tokens == (step.after.job.stream[-1].index,)
        if not how:
            outbox.epoch = got.epoch
        return step.after.job.stream[-1].epoch  # compared with the server's afterwards

    async def _remember(self, step: Step, action: str, outbox: Outbox) -> object:
        """What changes the owner alone."""
        match action:
            case "generate":
                number = outbox.num_tokens
                why = FinishReason.STOP if number + 1 == self._config.tokens else None
                outbox.add(EngineDelta(number, number, "x", (number,)), why)
            case "renew":
                return await self._renew(step, outbox)
            case "its deadline":
                self._end(step, outbox, FinishReason.DEADLINE)
            case "drain":
                outbox.leaving = True
            case "read the stream":
                outbox.continue_from(await read_progress(self._wire.redis, self._wire.keys, outbox.request_id))
                ending = _owner(step).ending
                if ending in (m.CANCELLED, m.DEADLINE) and outbox.finish_reason is None:
                    _add_end(outbox, FinishReason(ending))
            case "read it again":
                progress = await read_progress(self._wire.redis, self._wire.keys, outbox.request_id)
                after = step.after.owners[step.who]
                assert after is not None
                assert outbox.restart(outbox.epoch, progress) is (after.hold == owners.HELD)
            case _:
                raise AssertionError(f"nobody knows how to {action}")
        return None

    async def _renew(self, step: Step, outbox: Outbox) -> str:
        answer = await self._wire.worker.renew([(outbox.request_id, outbox.token)], lease_ms=LEASE_MS)
        if answer.lost:
            outbox.lose("the lease has lapsed")
            return "lost"
        if answer.cancelled:
            self._end(step, outbox, FinishReason.CANCELLED)
            return m.CANCELLED
        return "held"

    def _end(self, step: Step, outbox: Outbox, why: FinishReason) -> None:
        """What the engine's last delta brings about after an abort; nothing if the request is not there yet."""
        if _owner(step).made == owners.UNREAD:
            return
        if why is FinishReason.CANCELLED:
            outbox.discard()
        _add_end(outbox, why)

    def _drop(self, step: Step) -> None:
        real = self._real.pop((step.number, step.who))
        if real.outbox is not None:
            real.outbox.drop()

    def compare(self, number: int, expected: tuple[m.Owner | None, ...]) -> None:
        for who, owner in enumerate(expected):
            real = self._real.get((number, who))
            assert (real is None) == (owner is None), f"worker {who} has {real}, not {owner}"
            if real is not None and owner is not None:
                assert self._names[number].tokens[real.token] == owner.token
                if real.outbox is not None:
                    assert self._seen(number, real.outbox) == self._expected(owner), f"{real.outbox}, not {owner}"

    def _seen(self, number: int, outbox: Outbox) -> tuple[object, ...]:
        assert outbox.token_ids == list(range(outbox.num_tokens))
        epoch, _, last = outbox.last_id.partition("-")
        place = (self._names[number].epochs[int(epoch)], int(last))
        held = outbox.hold is Hold.HELD
        return place if held else place[0], outbox.num_tokens, outbox.can_send

    def _expected(self, owner: m.Owner) -> tuple[object, ...]:
        """Where it would write is of no account while its stream is lost."""
        place, can_send = owners.expected(owner), bool(owners.to_publish(owner, self._config.tokens))
        return place if owner.hold == owners.HELD else place[0], max(owner.made, 0), can_send


def _owner(step: Step) -> m.Owner:
    owner = step.before.owners[step.who]
    assert owner is not None
    return owner


def _add_end(outbox: Outbox, why: FinishReason) -> None:
    outbox.add(EngineDelta(outbox.num_tokens, outbox.num_chars, "", ()), why)


def _outbox(job: Claimed) -> Outbox:
    return Outbox(
        request_id=job.request_id,
        token=job.token,
        generation=job.generation,
        epoch=job.epoch,
        max_unsent_tokens=1000,
        on_pressure=lambda over: None,
        on_lost=lambda why: None,
        on_stuck=lambda reason: None,
    )


@dataclass
class _Reading:
    reader: StreamReader
    position: Position = START
    token_ids: list[int] = field(default_factory=list)
    status: str = readers.READING


class Readers:
    def __init__(self, wire: Wire, ids: list[str], names: list[Names]) -> None:
        self._wire = wire
        self._ids = ids
        self._names = names
        self._real = [_Reading(StreamReader(each)) for each in ids]

    async def do(self, step: Step, action: str) -> str:
        real, request_id = self._real[step.number], self._ids[step.number]
        match action:
            case "reader begins":
                real = self._real[step.number] = _Reading(StreamReader(request_id))
            case "reader resumes":
                real.reader = StreamReader(request_id, Position.parse(str(real.position)))
            case "look" | "read" | "read one":
                await self._read(real, request_id, action)
        return real.status

    async def _read(self, real: _Reading, request_id: str, action: str) -> None:
        events, reader = self._wire.keys.events(request_id), real.reader
        try:
            if action == "look":
                cursor, last = reader.cursor, await self._wire.redis.xrevrange(events, count=1)
                reader.tail(last[0] if last else None)
                if reader.done or reader.cursor != cursor:
                    return
            count = 1 if action == "read one" else None
            for item in reader.feed(await self._wire.redis.xrange(events, f"({reader.cursor}", "+", count)):
                real.position = item.position
                real.token_ids += getattr(item.event, "token_ids", ())
        except JobLost:
            real.status = readers.LOST
        except RequestReplaced:
            real.status = readers.REPLACED
        finally:
            if reader.done:
                real.status = readers.DONE

    def compare(self, number: int, expected: m.Reader) -> None:
        real, epochs = self._real[number], self._names[number].epochs
        assert real.status == expected.status
        assert real.token_ids == list(range(expected.had)), f"the reader has {real.token_ids}, not {expected.had}"
        if real.status == readers.READING:
            cursor, position = real.reader.cursor, real.position.entry
            found = (epochs[cursor.epoch], cursor.number), (epochs[position.epoch], position.number)
            assert found == (expected.cursor, expected.position), f"the reader is at {found}, not {expected}"
            assert real.reader.rereading == expected.rereading
