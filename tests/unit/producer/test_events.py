"""Events as stream entries, there and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from inferq.producer.errors import EngineFailure, RequestRefused, failure
from inferq.producer.events import (
    Delta,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prompt,
    Queued,
    Started,
    Timings,
    Usage,
    decode_event,
    encode_delta,
    encode_event,
)

naturals = st.integers(0, 2**53)
texts = st.text(max_size=50)
reasons = st.sampled_from(FinishReason)
ms = st.floats(0, 1e9, allow_nan=False)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
logprobs = st.none() | st.lists(st.dictionaries(texts, st.floats(-1e6, 0)), max_size=2)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
any_event: TypeAdapter[Any] = TypeAdapter(Event)
events = st.one_of(
    st.builds(Queued, v=naturals, generation=naturals, enqueued_at_ms=naturals, trace=st.none() | texts),
    st.builds(
        Started,
        attempt=naturals,
        worker=texts,
        resumed_tokens=st.lists(naturals, max_size=3).map(tuple),
        queue_ms=ms,
        prompt_tokens=st.none() | naturals,
        cached_tokens=st.none() | naturals,
    ),
    st.builds(Prompt, text=st.none() | texts, prompt_logprobs=logprobs),
    st.builds(
        Delta,
        choice=st.integers(0, 127),
        index=naturals,
        at=naturals,
        text=texts,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=st.none() | reasons,
    ),
    st.builds(
        Finished,
        finish_reasons=st.lists(reasons, max_size=3).map(tuple),
        usage=st.none() | st.builds(Usage, prompt_tokens=naturals, completion_tokens=naturals, cached_tokens=naturals),
        timings=st.none() | st.builds(Timings, queue_ms=ms, ttft_ms=st.none() | ms, total_ms=ms),
    ),
    st.builds(Failed, code=st.sampled_from(ErrorCode), message=texts, attempts=naturals),
)


@given(events)
def test_an_event_survives_its_entry(event: Event) -> None:
    kind, data = encode_event(event)
    assert kind == event.type
    assert "type" not in json.loads(data)
    assert decode_event({b"t": kind.encode(), b"d": data.encode()}) == event


@given(events, st.dictionaries(st.text(min_size=1).map(lambda name: f"x_{name}"), st.integers(), min_size=1))
def test_fields_that_nobody_knows_are_ignored(event: Event, news: dict[str, int]) -> None:
    kind, data = encode_event(event)
    entry = {b"t": kind.encode(), b"d": json.dumps(json.loads(data) | news).encode(), b"x": b"y"}
    assert decode_event(entry) == event


@given(naturals, naturals, st.text(), token_ids, st.none() | reasons)
def test_a_delta_is_written_as_its_model_writes_it(
    index: int, at: int, text: str, token_ids: tuple[int, ...], finish_reason: FinishReason | None
) -> None:
    event = Delta(index=index, at=at, text=text, token_ids=token_ids, finish_reason=finish_reason)
    written = encode_delta(index=index, at=at, text=text, token_ids=token_ids, finish_reason=finish_reason)
    assert written == encode_event(event)


@pytest.mark.parametrize("plane", range(0x11))
def test_every_character_is_written_as_its_model_writes_it(plane: int) -> None:
    points = (plane << 16 | low for low in range(1 << 16))
    text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
    event = Delta(index=0, at=0, text=text, token_ids=(), finish_reason=None)
    written = encode_delta(index=0, at=0, text=text, token_ids=(), finish_reason=None)
    assert written == encode_event(event)


@given(events, st.data())
def test_what_an_entry_says_is_what_its_json_says_to_the_models(event: Event, data: st.DataObject) -> None:
    """Whatever stands in a field: the same event as by the way over Python's own JSON, or an error as there."""
    kind, written = encode_event(event)
    names = st.sampled_from(sorted({*type(event).model_fields, "x"}))
    fields = json.loads(written) | data.draw(st.dictionaries(names, json_values, max_size=2))
    entry = {b"t": kind.encode(), b"d": json.dumps(fields).encode()}
    try:
        expected = any_event.validate_python({**fields, "type": kind})
    except ValueError:
        with pytest.raises(ValueError):
            decode_event(entry)
    else:
        assert decode_event(entry) == expected


@pytest.mark.parametrize("entry", [{}, {b"d": b"{}"}, {b"t": b"thought", b"d": b"{}"}])
def test_types_that_nobody_knows_are_none(entry: dict[bytes, bytes]) -> None:
    assert decode_event(entry) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"index":"a"}', b"{", b"\xff", b'{"type":"queued"}'])
def test_an_entry_that_does_not_fit_its_type_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_event({b"t": b"delta", b"d": data})


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_is_an_exception(code: ErrorCode) -> None:
    error = failure("r", Failed(code=code, message="m", attempts=2))
    refused = {ErrorCode.INVALID_REQUEST, ErrorCode.BAD_PAYLOAD, ErrorCode.UNSIGNED}
    assert isinstance(error, RequestRefused if code in refused else EngineFailure)
    assert (error.request_id, error.code, error.message, error.attempts) == ("r", code, "m", 2)
