"""Events as stream entries, there and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    encode_event,
)

naturals = st.integers(0, 2**53)
texts = st.text(max_size=50)
reasons = st.sampled_from(FinishReason)
ms = st.floats(0, 1e9, allow_nan=False)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
logprobs = st.none() | st.lists(st.dictionaries(texts, st.floats(-1e6, 0)), max_size=2)
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


@pytest.mark.parametrize("entry", [{}, {b"d": b"{}"}, {b"t": b"thought", b"d": b"{}"}])
def test_types_that_nobody_knows_are_none(entry: dict[bytes, bytes]) -> None:
    assert decode_event(entry) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"index":"a"}', b"{"])
def test_an_entry_that_does_not_fit_its_type_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_event({b"t": b"delta", b"d": data})


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_is_an_exception(code: ErrorCode) -> None:
    error = failure("r", Failed(code=code, message="m", attempts=2))
    refused = {ErrorCode.INVALID_REQUEST, ErrorCode.BAD_PAYLOAD, ErrorCode.UNSIGNED}
    assert isinstance(error, RequestRefused if code in refused else EngineFailure)
    assert (error.request_id, error.code, error.message, error.attempts) == ("r", code, "m", 2)
