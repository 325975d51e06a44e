"""The reader's rules, one by one. `test_reader_property.py` shows that together they are enough."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferq.producer.errors import JobLost, RequestReplaced
from inferq.producer.events import Delta, Event, Failed, Finished
from inferq.producer.position import Position
from inferq.producer.reader import Entry, StreamReader


def entry(entry_id: str, kind: str, **data: Any) -> Entry:
    return entry_id.encode(), {b"t": kind.encode(), b"d": json.dumps(data).encode()}


def queued(epoch: int = 10, generation: int = 10) -> Entry:
    return entry(f"{epoch}-0", "queued", v=1, generation=generation, enqueued_at_ms=1)


def started(epoch: int = 20, *resumed: int) -> Entry:
    return entry(f"{epoch}-0", "started", attempt=1, worker="w", resumed_tokens=resumed or [0], queue_ms=1.0)


def delta(entry_id: str, index: int, at: int, text: str, token_ids: list[int], **more: Any) -> Entry:
    return entry(entry_id, "delta", index=index, at=at, text=text, token_ids=token_ids, **more)


def finished(entry_id: str, *reasons: str) -> Entry:
    return entry(entry_id, "finished", finish_reasons=reasons or ["stop"])


WHOLE = [
    queued(),
    started(),
    delta("20-1", 0, 0, "He", [1]),
    delta("20-2", 1, 2, "llo", [2, 3], finish_reason="stop"),
    finished("20-3"),
]


def read(reader: StreamReader, *entries: Entry) -> list[Event]:
    return [item.event for item in reader.feed(entries)]


def kinds(events: list[Event]) -> list[str]:
    return [event.type for event in events]


def test_a_whole_stream_in_one_read() -> None:
    reader = StreamReader("r")
    items = list(reader.feed(WHOLE))
    assert kinds([item.event for item in items]) == ["queued", "started", "delta", "delta", "finished"]
    assert [str(item.position) for item in items] == [
        "10-0:0.0", "20-0:0.0", "20-1:1.2", "20-2:3.5", "20-3:3.5",
    ]  # fmt: skip
    assert reader.done


def test_events_come_lazily_so_that_a_bad_entry_does_not_take_the_good_ones_with_it() -> None:
    bad = (b"20-2", {b"t": b"delta", b"d": b'{"text": "secret"}'})
    items = StreamReader("r").feed([*WHOLE[:3], bad])
    assert kinds([next(items).event for _ in range(3)]) == ["queued", "started", "delta"]
    with pytest.raises(JobLost, match="20-2") as caught:
        next(items)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "a traceback would show generated text"


def test_another_epoch_in_a_later_read_asks_for_the_whole_stream() -> None:
    reader = StreamReader("r")
    read(reader, WHOLE[0])
    assert not read(reader, WHOLE[1], WHOLE[2])
    assert reader.rereading
    assert str(reader.cursor) == "0-0"
    assert kinds(read(reader, *WHOLE[:3])) == ["started", "delta"]
    assert not reader.rereading
    assert str(reader.cursor) == "20-1"


def test_tokens_behind_the_cursor_are_found_at_the_next_epoch() -> None:
    """A failover took 30-1 back; another owner wrote 25-1, behind it; the terminal event is the next to be read."""
    reader = StreamReader("r")
    read(reader, queued(), started(30), delta("30-1", 0, 0, "a", [1]))
    assert not read(reader, finished("40-0"))
    text = [queued(), started(25), delta("25-1", 0, 0, "ab", [1, 2]), finished("40-0")]
    assert [getattr(event, "text", None) for event in read(reader, *text)] == ["b", None]
    assert reader.done


def test_a_gap_asks_for_the_whole_stream() -> None:
    reader = StreamReader("r", Position.parse("20-1:1.2"))
    assert not read(reader, delta("20-5", 2, 5, "!", [9]))
    assert reader.rereading
    rest = read(reader, *WHOLE[:3], delta("20-4", 1, 2, "llo", [2]), delta("20-5", 2, 5, "!", [9]))
    assert [(event.index, event.at, event.text) for event in rest] == [(1, 2, "llo"), (2, 5, "!")]


@pytest.mark.parametrize(("index", "at"), [(2, 0), (0, 1)])
def test_a_hole_in_the_whole_stream_is_reported(index: int, at: int) -> None:
    """Somebody trimmed it: what is missing will not come, and a silent hole in the text is worse than an error."""
    reader = StreamReader("r")
    with pytest.raises(JobLost, match="lacks tokens"):
        read(reader, started(), delta("20-9", index, at, "x", [1]))


def test_of_a_delta_that_is_known_in_part_comes_the_rest() -> None:
    reader = StreamReader("r", Position.parse("20-1:2.3"))
    logprobs = [{"id": number} for number in (1, 2, 3)]
    (event,) = read(reader, delta("20-2", 0, 0, "abcdé", [1, 2, 3], logprobs=logprobs, finish_reason="length"))
    assert isinstance(event, Delta)
    assert (event.index, event.at, event.text, event.token_ids) == (2, 3, "dé", (3,))
    assert event.logprobs == [{"id": 3}]
    assert event.finish_reason == "length"


def test_text_may_come_after_its_tokens_and_tokens_without_text() -> None:
    reader = StreamReader("r")
    entries = [queued(), started(), delta("20-1", 0, 0, "", [1, 2]), delta("20-2", 2, 0, "🦙", [])]
    events = read(reader, *entries)[2:]
    assert [(event.text, event.token_ids) for event in events] == [("", (1, 2)), ("🦙", ())]


def test_a_last_entry_behind_the_cursor_asks_for_the_whole_stream() -> None:
    reader = StreamReader("r")
    read(reader, queued(), started(), delta("20-1", 0, 0, "He", [1]))
    reader.tail(WHOLE[2])
    assert not reader.rereading
    reader.tail(WHOLE[1])
    assert reader.rereading
    assert not read(reader, *WHOLE[:2])
    assert kinds(read(reader, delta("20-1", 0, 0, "He", [1]), delta("20-2", 1, 2, "l", [2]))) == ["delta"]


def test_a_stream_that_is_gone_ends_the_reader() -> None:
    with pytest.raises(JobLost, match="gone"):
        StreamReader("r").tail(None)


def test_another_job_under_the_id_ends_the_reader() -> None:
    reader = StreamReader("r")
    read(reader, queued(), started())
    with pytest.raises(RequestReplaced):
        read(reader, queued(50, 50))


def test_another_job_is_seen_by_a_resumed_reader_too() -> None:
    with pytest.raises(RequestReplaced):
        read(StreamReader("r", Position.parse("20-1:1.2")), queued(50, 50))
    resumed = StreamReader("r", Position.parse("20-1"))
    with pytest.raises(RequestReplaced):
        read(resumed, queued(50, 50))


def test_the_first_queued_comes_again_when_the_stream_is_read_again() -> None:
    reader = StreamReader("r", Position.parse("20-1:1.2"))
    reader.tail(WHOLE[1])
    assert kinds(read(reader, *WHOLE)) == ["delta", "finished"]


def test_what_a_newer_version_writes_is_ignored() -> None:
    reader = StreamReader("r")
    news = [entry("20-1", "thought", text="hm"), delta("20-2", 0, 0, "a", [1], mood="good"), (b"20-3", {b"x": b"y"})]
    assert kinds(read(reader, queued(), started(), *news)) == ["queued", "started", "delta"]
    assert str(reader.cursor) == "20-3"


def test_nothing_after_the_terminal_event_is_looked_at() -> None:
    reader = StreamReader("r")
    assert kinds(read(reader, *WHOLE, (b"20-4", {b"t": b"delta", b"d": b"garbage"})))[-1] == "finished"


@pytest.mark.parametrize("position", ["20-3", "20-3:3.5"])
def test_a_position_behind_the_terminal_event_has_nothing_to_come(position: str) -> None:
    reader = StreamReader("r", Position.parse(position))
    reader.tail(WHOLE[-1])
    assert reader.done or not read(reader, *WHOLE)
    assert reader.done


def test_an_entry_id_alone_means_what_the_stream_holds_up_to_it() -> None:
    reader = StreamReader("r", Position.parse("20-1"))
    assert reader.rereading, "one command must read the whole stream"
    items = list(reader.feed(WHOLE))
    assert kinds([item.event for item in items]) == ["delta", "finished"]
    assert str(items[0].position) == "20-2:3.5"


def test_a_failure_is_an_event_like_any_other() -> None:
    reader = StreamReader("r")
    (*_, event) = read(reader, queued(), entry("30-0", "failed", code="internal", message="m", attempts=2))
    assert event == Failed(code="internal", message="m", attempts=2)
    assert reader.done


def test_a_job_may_end_before_it_began() -> None:
    reader = StreamReader("r")
    events = read(reader, queued(), finished("30-0", "deadline"))
    assert events[-1] == Finished(finish_reasons=("deadline",))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b'{"index":0,"at":0,"text":"a","token_ids":[1],"choice":-1}']
)
def test_a_broken_entry_of_a_known_type_ends_the_reader(data: bytes) -> None:
    with pytest.raises(JobLost, match="cannot be read"):
        read(StreamReader("r"), queued(), (b"20-0", {b"t": b"delta", b"d": data}))
