"""Whatever owners, lost leases and failovers do to a stream, its reader gets each token and code point once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.producer.events import Delta, Event, Failed, Finished, Prompt, Queued, Started, encode_event
from inferq.producer.position import EntryId, Position
from inferq.producer.reader import Entry, StreamReader

NUM_TOKENS = 12
GENERATION = 100
#: A token's text may be empty (half a character is held back), one character, or several.
PIECES = ("", "a", "é", "🦙", " the", "\n\n", "ﷺ-")


@dataclass
class Choice:
    token_ids: list[int]
    texts: list[str]
    tokens: int = 0
    points: int = 0
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Log:
    """A stream as its owners write it: what stands is never changed, but a failover takes the end of it away."""

    rng: random.Random
    choices: list[Choice]
    entries: list[tuple[EntryId, Event]] = field(default_factory=list)
    clock: int = GENERATION
    used_epochs: set[int] = field(default_factory=set)
    epoch: int = 0

    def __post_init__(self) -> None:
        self._append(EntryId(GENERATION, 0), Queued(v=1, generation=GENERATION, enqueued_at_ms=1))
        self.used_epochs.add(GENERATION)

    @property
    def last(self) -> EntryId:
        return self.entries[-1][0]

    @property
    def is_over(self) -> bool:
        return isinstance(self.entries[-1][1], Finished | Failed)

    def new_owner(self) -> None:
        """A claim or a re-acquire: an epoch that never was, above the stream's last; the clock may lie behind."""
        if self.is_over:
            return
        self.clock += self.rng.randint(1, 40)
        self.epoch = max(self.clock, self.last.epoch + 1)
        while self.epoch in self.used_epochs:
            self.epoch += 1
        self.used_epochs.add(self.epoch)
        self._count()
        resumed = tuple(choice.tokens for choice in self.choices)
        started = Started(attempt=len(self.used_epochs), worker="w", resumed_tokens=resumed, queue_ms=0.5)
        self._append(EntryId(self.epoch, 0), started)
        if not any(isinstance(event, Prompt) for _, event in self.entries):
            self._append(EntryId(self.epoch, 1), Prompt(text="echo"))

    def publish(self) -> None:
        """The owner's next entry: some more tokens, or some more text, or both, of one choice."""
        if self.epoch != self.last.epoch or self.is_over:
            self.new_owner()
        open_choices = [n for n, choice in enumerate(self.choices) if not choice.ended]
        if self.is_over:
            return
        if not open_choices:
            self._append(self._next(), Finished(finish_reasons=("length",) * len(self.choices)))
            return
        number = self.rng.choice(open_choices)
        choice = self.choices[number]
        tokens = min(NUM_TOKENS, choice.tokens + self.rng.randint(0, 5))
        most = len("".join(choice.texts[:tokens]))
        points = self.rng.randint(min(choice.points, most), most) if choice.points <= most else choice.points
        ended = tokens == NUM_TOKENS and self.rng.random() < 0.6
        points = len(choice.text) if ended else points
        delta = Delta(
            choice=number,
            index=choice.tokens,
            at=choice.points,
            text=choice.text[choice.points : points],
            token_ids=tuple(choice.token_ids[choice.tokens : tokens]),
            logprobs=[{"id": each} for each in choice.token_ids[choice.tokens : tokens]],
            finish_reason="length" if ended else None,
        )
        self._append(self._next(), delta)
        choice.tokens, choice.points, choice.ended = tokens, points, ended

    def fail_over(self) -> None:
        """The promoted replica lacks the last entries, and its clock may be behind."""
        keep = self.rng.randint(max(1, len(self.entries) - 6), len(self.entries))
        if keep < len(self.entries):
            del self.entries[keep:]
            self.epoch = 0
            self.clock = self.rng.randint(min(self.last.epoch, self.clock), self.clock)

    def after(self, cursor: EntryId, count: int | None) -> list[Entry]:
        found = [(entry, event) for entry, event in self.entries if entry > cursor]
        return [as_entry(entry, event) for entry, event in found[:count]]

    def _next(self) -> EntryId:
        return EntryId(self.last.epoch, self.last.number + 1)

    def _append(self, entry: EntryId, event: Event) -> None:
        assert not self.entries or entry > self.last
        self.entries.append((entry, event))

    def _count(self) -> None:
        for number, choice in enumerate(self.choices):
            deltas = [event for _, event in self.entries if isinstance(event, Delta) and event.choice == number]
            choice.tokens = sum(len(delta.token_ids) for delta in deltas)
            choice.points = sum(len(delta.text) for delta in deltas)
            choice.ended = any(delta.finish_reason for delta in deltas)


def as_entry(entry: EntryId, event: Event) -> Entry:
    kind, data = encode_event(event)
    return str(entry).encode(), {b"t": kind.encode(), b"d": data.encode()}


class Consumer:
    """Whoever reads: keeps what the reader yields, and may go on from its position with a new reader."""

    def __init__(self, log: Log, rng: random.Random, resumes: bool) -> None:
        self.log, self.rng, self.resumes = log, rng, resumes
        self.reader = StreamReader("r")
        self.position = "0"
        self.events: list[Event] = []
        self.resumed = False

    def read(self, *, to_the_end: bool = False) -> None:
        if self.reader.done:
            return
        count = None if self.reader.rereading else self.rng.choice((1, 2, 7, None))
        entries = self.log.after(self.reader.cursor, count)
        if not entries:
            last, event = self.log.entries[-1]
            self.reader.tail(as_entry(last, event))
        for item in self.reader.feed(entries):
            self.position = str(item.position)
            self.events.append(item.event)
            if self.resumes and not to_the_end and self.rng.random() < 0.1:
                self.resume()
                return

    def resume(self) -> None:
        """Another process goes on where this one was."""
        if self.resumes and not self.reader.done:
            self.reader = StreamReader("r", Position.parse(self.position))
            self.resumed = True


OPERATIONS = ("publish", "publish", "publish", "read", "read", "new_owner", "fail_over", "resume")


def play(operations: list[str], seed: int, num_choices: int, resumes: bool = False) -> tuple[Log, Consumer]:
    rng = random.Random(seed)
    choices = [
        Choice([rng.randrange(1000) for _ in range(NUM_TOKENS)], [rng.choice(PIECES) for _ in range(NUM_TOKENS)])
        for _ in range(num_choices)
    ]
    log = Log(rng, choices)
    consumer = Consumer(log, rng, resumes)
    for operation in operations:
        if operation in ("read", "resume"):
            getattr(consumer, operation)()
        else:
            getattr(log, operation)()
    while not log.is_over:
        log.publish()
    reads = 0
    while not consumer.reader.done:
        consumer.read(to_the_end=True)
        reads += 1
        assert reads < 200, "the reader never comes to the end"
    return log, consumer


def check(log: Log, consumer: Consumer) -> None:
    for number, choice in enumerate(log.choices):
        deltas = [event for event in consumer.events if isinstance(event, Delta) and event.choice == number]
        tokens = points = 0
        for delta in deltas:
            assert (delta.index, delta.at) == (tokens, points)
            assert delta.text or delta.token_ids or delta.finish_reason
            assert [each["id"] for each in delta.logprobs or ()] == list(delta.token_ids)
            tokens, points = tokens + len(delta.token_ids), points + len(delta.text)
        assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
        assert "".join(delta.text for delta in deltas) == choice.text
        if not consumer.resumed:
            assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert [isinstance(event, Finished) for event in consumer.events].count(True) == 1
    assert isinstance(consumer.events[-1], Finished)
    assert sum(isinstance(event, Queued) for event in consumer.events) == 1
    if not consumer.resumed:
        assert sum(isinstance(event, Prompt) for event in consumer.events) == 1


@given(st.lists(st.sampled_from(OPERATIONS), max_size=80), st.integers(0, 2**32), st.integers(1, 2), st.booleans())
def test_every_token_and_code_point_comes_once(
    operations: list[str], seed: int, num_choices: int, resumes: bool
) -> None:
    check(*play(operations, seed, num_choices, resumes))


@pytest.mark.parametrize("resumes", [False, True])
def test_it_holds_in_many_random_plays(resumes: bool) -> None:
    """Random plays go deeper than Hypothesis' examples, which begin short."""
    for seed in range(1000):
        check(*play(random.Random(seed).choices(OPERATIONS, k=50), seed, 1, resumes))


@settings(max_examples=20)
@given(st.lists(st.sampled_from(("publish", "new_owner")), max_size=60), st.integers(0, 2**32), st.booleans())
def test_every_position_goes_on_with_exactly_the_rest(operations: list[str], seed: int, plain: bool) -> None:
    """Also from an entry id alone, which means what the stream holds up to it."""
    log, _ = play(operations, seed, 2)
    entries = log.after(EntryId(0, 0), None)
    items = list(StreamReader("r").feed(entries))
    for number, item in enumerate(items):
        text = str(item.position.entry) if plain else str(item.position)
        reader = StreamReader("r", Position.parse(text))
        reader.tail(entries[-1])
        rest = []
        while not reader.done:
            rest += reader.feed(log.after(reader.cursor, None))
        assert rest == items[number + 1 :]


def test_the_play_meets_what_it_is_about() -> None:
    """Among a few hundred plays there are tokens taken back after they were read, and re-reads that slice deltas."""
    rng = random.Random(1)
    sliced = 0
    for seed in range(300):
        log, consumer = play(rng.choices(OPERATIONS, k=60), seed, 1)
        written = {(delta.index, delta.token_ids) for _, delta in log.entries if isinstance(delta, Delta)}
        got = {(delta.index, delta.token_ids) for delta in consumer.events if isinstance(delta, Delta)}
        sliced += not got <= written
    assert sliced > 30
