"""Positions: as text and back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.producer.errors import InvalidRequest
from inferq.producer.position import MAX_CHOICES, START, EntryId, Had, Position

entry_ids = st.builds(EntryId, st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))
counts = st.lists(st.builds(Had, st.integers(0, 2**31), st.integers(0, 2**31)), min_size=1, max_size=MAX_CHOICES).map(
    tuple
)


@given(st.builds(Position, entry_ids, st.none() | counts))
def test_a_position_survives_being_text(position: Position) -> None:
    assert Position.parse(str(position)) == position


def test_the_texts_are_those_of_the_wire() -> None:
    assert Position.parse("0") == Position.parse("0-0") == START
    assert str(START) == "0"
    assert Position.parse("1764000000000000-7") == Position(EntryId(1764000000000000, 7), None)
    position = Position(EntryId(1764000000000000, 7), (Had(42, 180), Had(40, 171)))
    assert str(position) == "1764000000000000-7:42.180,40.171"


@given(entry_ids)
def test_entry_ids_are_ordered_as_redis_orders_them(entry: EntryId) -> None:
    assert EntryId.parse(str(entry).encode()) == entry
    assert entry < EntryId(entry.epoch + 1, 0)
    assert entry < EntryId(entry.epoch, entry.number + 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "$",
        "1",
        "1-",
        "-1",
        "1-2:",
        "1-2:3",
        "1-2:3.",
        "1-2:3.4,",
        "1-2:-3.4",
        "1-2 ",
        "1-2\n",
        "\u0661-\u0662",
        f"{2**64}-0",
        f"1-{2**64}",
        "1-2:" + ",".join(["1.1"] * (MAX_CHOICES + 1)),
    ],
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="position"):
        Position.parse(text)
