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
from inferq.producer.requests import Sampling
from inferq.worker.commands import Claimed
from inferq.worker.errors import BadPayload, RedisFull
from inferq.worker.generate import generate
from inferq.worker.prepare import failure, parse, read_call, run_where_it_fits

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
    prompt, sampling = parse({"prompt": "hi", "sampling": given}, claimed())
    assert prompt.text == "hi"
    values = {**given, "stop": ("x",), "stop_token_ids": (1, 2)}
    assert sampling == SamplingParams(**values)


def test_the_seed_of_a_plain_job_is_its_own_and_stays_the_same() -> None:
    seeds = {parse({"prompt": "hi"}, claimed(name, generation))[1].seed for name in "ab" for generation in (1, 2)}
    assert len(seeds) == 4
    assert parse({"prompt": "hi"}, claimed())[1].seed == parse({"prompt": "hi"}, claimed())[1].seed


def test_messages_keep_what_a_template_may_ask_for() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    prompt, _ = parse({"messages": [message]}, claimed())
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
        parse(request_, claimed())
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
        (RedisFull(), ErrorCode.INTERNAL, "Redis is full"),
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
        parse({"prompt": "hi", **many}, claimed())
    assert len(str(caught.value)) < 400
    assert json.dumps(str(caught.value))
