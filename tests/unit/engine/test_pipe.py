"""The pipe's frames: every message survives, however its bytes are cut; what is no message is an error."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inferq.engine.pipe as pipe
from inferq.engine.pipe import (
    Abort,
    Add,
    Decoder,
    Fatal,
    Freed,
    Log,
    Pause,
    Paused,
    Ping,
    PipeError,
    Pong,
    Ready,
    Refused,
    Resume,
    Stats,
    Step,
    Stop,
    encode,
)

STATS = Stats(7, 2, 3, 40, 60, 1)
KEYS = st.integers(min_value=1, max_value=2**53)
IDS = st.lists(st.integers(min_value=0, max_value=2**31), max_size=5)
OUTPUTS = st.lists(st.tuples(KEYS, IDS, st.sampled_from([None, "stop", "length"])).map(list), max_size=4)
MESSAGES = st.one_of(
    st.builds(Add, KEYS, IDS, st.just({"max_tokens": None, "temperature": 0.5, "stop_token_ids": [1]})),
    st.builds(Abort, KEYS),
    st.builds(Pause, KEYS),
    st.builds(Resume, KEYS),
    st.builds(Add, KEYS, IDS, st.just({}), IDS),
    st.builds(Paused, KEYS),
    st.sampled_from([Stop(), Ping(), Pong()]),
    st.just(Ready("m", "/text", [2], 10, 20, 30, 16, 4, 64, "float32", "cpu", "reference")),
    st.builds(Step, OUTPUTS, st.just(STATS)),
    st.builds(Refused, KEYS, st.text(), st.booleans()),
    st.builds(Freed, KEYS, st.just(STATS)),
    st.builds(Log, st.just("info"), st.text(), st.dictionaries(st.text(), st.integers())),
    st.builds(Fatal, st.text()),
)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@given(messages=st.lists(MESSAGES, max_size=6), data=st.data())
def test_every_message_survives_however_its_bytes_are_cut(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = Decoder()
    seen: list[Any] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen.extend(decoder.feed(stream[start:end]))
    assert seen == messages


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"{}",
        b"[]",
        b"7",
        b'["no such kind"]',
        b'[["abort"], 1]',
        b'["abort"]',
        b'["abort", 1, 2]',
        b'["step", []]',
        b'["step", [], {"step": 1}]',
        b'["freed", 1, 7]',
        b'["step"]',
    ],
)
def test_what_is_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(PipeError, match="not a message"):
        list(Decoder().feed(frame(body)))


def test_what_came_before_garbage_is_still_handed_out() -> None:
    messages = Decoder().feed(encode(Abort(1)) + frame(b"garbage"))
    assert next(messages) == Abort(1)
    with pytest.raises(PipeError):
        next(messages)


def test_a_frame_is_bounded_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipeError, match="is over"):
        list(Decoder().feed(b"\xff" * 8))
    monkeypatch.setattr(pipe, "MAX_FRAME_BYTES", 100)
    with pytest.raises(PipeError, match="a fatal message of 117 bytes is over 100"):
        encode(Fatal("x" * 100))


def test_a_frame_is_a_length_and_a_json_array() -> None:
    data = encode(Freed(3, STATS))
    (length,) = struct.unpack(">I", data[:4])
    assert length == len(data) - 4
    assert json.loads(data[4:]) == [
        "freed",
        3,
        {"step": 7, "running": 2, "waiting": 3, "used_blocks": 40, "free_blocks": 60, "preemptions": 1},
    ]
