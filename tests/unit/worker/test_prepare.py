"""From a payload to what the engine takes, and what is said of a payload that is none."""

from __future__ import annotations

import json
import pickle
import threading
from typing import Any

import pytest
from arq.jobs import serialize_job
from arq.worker import func

from inferq.engine.errors import EngineCrashedError, EngineOverloadedError, InvalidRequestError, RequestFailedError
from inferq.engine.request import SamplingParams
from inferq.producer.contract import encode_json
from inferq.producer.events import ErrorCode
from inferq.producer.requests import MAX_MESSAGE_VALUES, MAX_MESSAGES, MAX_PROMPT_TOKENS, Sampling
from inferq.worker.commands import Claimed
from inferq.worker.errors import BadPayload, ServerFull
from inferq.worker.generate import generate
from inferq.worker.prepare import MAX_VALUES, failure, parse, read_call, run_where_it_fits

FUNCTIONS = {"generate": func(generate, name="generate")}
CANARY = "canary-7f3a"


def claimed(request_id: str = "a", generation: int = 5) -> Claimed:
    return Claimed(request_id, "token", 9, generation, 1, b"", 0.0, None)


def payload(function: str = "generate", args: Any = ({"prompt": "hi"},), kwargs: Any = None) -> bytes:
    data = serialize_job(function, tuple(args), kwargs or {}, None, 1, serializer=encode_json)
    assert data is not None
    return data


def test_a_job_of_arq_is_read() -> None:
    function, request = read_call(payload(), FUNCTIONS)
    assert function is FUNCTIONS["generate"]
    assert request == {"prompt": "hi"}


def elements(field: str, element: bytes, count: int) -> bytes:
    """A payload whose request has a list of so many elements."""
    request = b'{"prompt":"x","%s":[%s]}' % (field.encode(), b",".join([element] * count))
    return b'{"t":null,"f":"generate","a":[' + request + b'],"k":{},"et":1}'


HOSTILE = {
    "lists": elements("junk", b"[]", MAX_VALUES),
    "objects": elements("messages", b"{}", MAX_VALUES),
    "keys": elements("messages", b"{%s}" % b",".join(b'"%d":1' % n for n in range(MAX_VALUES)), 1),
    "numbers": elements("junk", b"1", 2 * MAX_VALUES),
    "strings": elements("stop", b'"a"', 2 * MAX_VALUES),
    "endless-ids": elements("prompt_token_ids", b"1", MAX_VALUES + MAX_PROMPT_TOKENS + 2),
    "bad-ids": elements("prompt_token_ids", b"-1", 2 * MAX_VALUES),
    "no-ids": elements("prompt_token_ids", b'"x"', 2 * MAX_VALUES),
    "open-string": b'{"t":null,"f":"generate","a":[{"prompt":"' + b"[" * 2 * MAX_VALUES,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_more_values_than_any_request_has_are_refused_before_they_are_looked_at(data: bytes) -> None:
    with pytest.raises(BadPayload, match=f"more than {MAX_VALUES} values"):
        read_call(data, FUNCTIONS)


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": '{"a":[1,{"b":"\\"}],' * 60_000},
        {"prompt": ":,[{" * 500_000},
        {"prompt_token_ids": [123] * MAX_PROMPT_TOKENS},
        {"messages": [{"role": "user", "content": "[[{,:", "x": {"k": [1]}}] * MAX_MESSAGES},
        {"messages": [{"role": "user", "x": {str(n): n for n in range(MAX_MESSAGE_VALUES - 2)}}]},
    ],
    ids=["json-as-text", "signs-as-text", "token-ids", "messages", "message-values"],
)
def test_the_largest_requests_that_producers_may_send_are_read(request_: dict[str, Any]) -> None:
    _, read = read_call(payload(args=(request_,)), FUNCTIONS)
    assert read == request_
    assert parse(read, claimed(), "tiny").deadline_ms is None


def test_many_errors_are_counted_not_listed() -> None:
    _, request = read_call(elements("prompt_token_ids", b"-1", MAX_VALUES // 2), FUNCTIONS)
    with pytest.raises(BadPayload, match=f"the request has {MAX_VALUES // 2 + 1} wrong fields or values"):
        parse({**request, "surprise": 1}, claimed(), "tiny")


class Touch:
    """A pickle of this would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04garbage",
        b"[1, 2]",
        b"null",
        b'{"f": "generate"}',
        b'{"t": null, "f": "generate", "a": 5, "k": {}, "et": 1}',
        b'{"t": null, "f": ["generate"], "a": [{}], "k": {}, "et": 1}',
        b"\xff\xfe{}",
        b"[" * 100_000,
        payload(function="other"),
        payload(args=()),
        payload(args=({}, {})),
        payload(kwargs={"x": 1}),
        pickle.dumps({"t": None, "f": "generate", "a": [{"prompt": "hi"}], "k": {}, "et": 1}),
    ],
)
def test_anything_else_is_a_bad_payload(data: bytes) -> None:
    with pytest.raises(BadPayload):
        read_call(data, FUNCTIONS)


def test_a_pickle_is_never_loaded(tmp_path: Any) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(BadPayload):
        read_call(pickle.dumps(Touch(str(marker))), FUNCTIONS)
    assert not marker.exists()


def test_every_field_of_sampling_reaches_the_engine() -> None:
    given = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.25,
        "stop": ["x"],
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 11,
    }
    assert set(given) == set(Sampling.model_fields)
    prompt, sampling, _ = parse({"prompt": "hi", "sampling": given}, claimed(), "tiny")
    assert prompt.text == "hi"
    values = {**given, "stop": ("x",), "stop_token_ids": (1, 2)}
    assert sampling == SamplingParams(**values)


def test_the_seed_of_a_plain_job_is_its_own_and_stays_the_same() -> None:
    def seed(job: Claimed) -> int:
        return parse({"prompt": "hi"}, job, "tiny").sampling.seed

    assert len({seed(claimed(name, generation)) for name in "ab" for generation in (1, 2)}) == 4
    assert seed(claimed()) == seed(claimed())


def test_messages_keep_what_a_template_may_ask_for() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    prompt, _, _ = parse({"messages": [message]}, claimed(), "tiny")
    assert prompt.messages == [message]


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        ({"prompt": CANARY, "sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"prompt": CANARY, "surprise": CANARY}, "surprise"),
        ({"prompt": [CANARY]}, "prompt"),
        ({"prompt": CANARY, "prompt_token_ids": [1]}, "exactly one"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.0"),
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": f"{CANARY} \ud800"}, "prompt: Input should be a valid string"),
        ({"messages": [{"role": "", "content": CANARY}]}, "messages.0.role"),
        ("text", ""),
        (None, ""),
    ],
)
def test_what_is_wrong_with_a_request_is_named_without_its_text(request_: Any, place: str) -> None:
    with pytest.raises(BadPayload) as caught:
        parse(request_, claimed(), "tiny")
    assert place in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("exc", "code", "says"),
    [
        (BadPayload("no job"), ErrorCode.BAD_PAYLOAD, "no job"),
        (InvalidRequestError("max_tokens"), ErrorCode.INVALID_REQUEST, "max_tokens"),
        (EngineCrashedError(CANARY), ErrorCode.ENGINE_CRASHED, "the engine died twice with this request alone"),
        (EngineOverloadedError(CANARY), ErrorCode.INTERNAL, "as many requests"),
        (RequestFailedError(CANARY), ErrorCode.INTERNAL, "RequestFailedError"),
        (ServerFull(), ErrorCode.INTERNAL, "Redis has been full"),
        (KeyError(CANARY), ErrorCode.INTERNAL, "KeyError"),
    ],
)
def test_each_exception_has_its_code(exc: Exception, code: ErrorCode, says: str) -> None:
    event = failure(exc, 2)
    assert event.code is code
    assert says in event.message
    assert CANARY not in event.message
    assert event.attempts == 2


async def test_large_work_goes_to_a_thread() -> None:
    here = threading.get_ident()
    assert await run_where_it_fits(10, threading.get_ident) == here
    assert await run_where_it_fits(10**6, threading.get_ident) != here


def test_a_message_is_bounded() -> None:
    assert len(failure(InvalidRequestError("x" * 10**6), 1).message) == 1000
    many = {str(number): 1 for number in range(1000)}
    with pytest.raises(BadPayload) as caught:
        parse({"prompt": "hi", **many}, claimed(), "tiny")
    assert len(str(caught.value)) < 400
    assert json.dumps(str(caught.value))
