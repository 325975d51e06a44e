"""Every bound of a request, at its limit and one past it, and the messages of what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.producer.contract import MODEL_PATTERN, is_request_id, new_request_id, served_name
from inferq.producer.errors import InvalidRequest
from inferq.producer.payload import build_request
from inferq.producer.requests import (
    MAX_DEADLINE_MS,
    MAX_MESSAGE_VALUES,
    MAX_MESSAGES,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    GenerateRequest,
    Sampling,
)

MESSAGE = {"role": "user", "content": "hi"}
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def sampling(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "sampling": fields}


AT_THE_LIMIT = {
    "prompt": {"prompt": "x" * MAX_PROMPT_CHARS},
    "prompt_token_ids": {"prompt_token_ids": [0] * MAX_PROMPT_TOKENS},
    "token id": {"prompt_token_ids": [0, MAX_TOKEN_ID]},
    "messages": {"messages": [MESSAGE] * MAX_MESSAGES},
    "role": {"messages": [{"role": "r" * 64, "content": None}]},
    "all messages": {"messages": [{"role": "user", "content": "x" * (MAX_PROMPT_CHARS // 2)}] * 2},
    "further values": {"messages": [MESSAGE | {"tool_calls": [0] * (MAX_MESSAGE_VALUES - 2)}]},
    "commas in a further field": {"messages": [MESSAGE | {"reasoning_content": "[," * MAX_MESSAGE_VALUES}]},
    "priority": {"prompt": "x", "priority": 100},
    "least priority": {"prompt": "x", "priority": -100},
    "deadline_ms": {"prompt": "x", "deadline_ms": MAX_DEADLINE_MS},
    "least deadline_ms": {"prompt": "x", "deadline_ms": 1},
    "model": {"prompt": "x", "model": "m" * 128},
    "tenant": {"prompt": "x", "tenant": "t" * 128},
    "trace": {"prompt": "x", "trace": TRACE},
    "max_tokens": sampling(max_tokens=MAX_TOKENS),
    "least max_tokens": sampling(max_tokens=1),
    "no max_tokens": sampling(max_tokens=None),
    "temperature": sampling(temperature=MAX_TEMPERATURE),
    "greedy": sampling(temperature=0),
    "tiny temperature": sampling(temperature=1e-10),
    "top_k": sampling(top_k=MAX_TOKEN_ID),
    "top_p": sampling(top_p=1.0),
    "tiny top_p": sampling(top_p=5e-324),
    "stop": sampling(stop=["s" * MAX_STOP_CHARS] * MAX_STOP_STRINGS),
    "one stop": sampling(stop="s"),
    "stop_token_ids": sampling(stop_token_ids=[MAX_TOKEN_ID] * MAX_STOP_TOKEN_IDS),
    "seed": sampling(seed=MAX_SEED),
    "least seed": sampling(seed=0),
}

PAST_THE_LIMIT = {
    "prompt": ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, "prompt: .*4194304"),
    "prompt_token_ids": ({"prompt_token_ids": [0] * (MAX_PROMPT_TOKENS + 1)}, "prompt_token_ids: .*1048576"),
    "token id": ({"prompt_token_ids": [MAX_TOKEN_ID + 1]}, "prompt_token_ids.0: .*2147483647"),
    "huge token id": ({"prompt_token_ids": [2**63]}, "prompt_token_ids.0: .*2147483647"),
    "negative token id": ({"prompt_token_ids": [5, -1]}, "prompt_token_ids.1: .*0"),
    "token id as text": ({"prompt_token_ids": ["5"]}, "prompt_token_ids.0: .*integer"),
    "token id as bool": ({"prompt_token_ids": [True]}, "prompt_token_ids.0: .*integer"),
    "messages": ({"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "messages: .*4096"),
    "role": ({"messages": [{"role": "r" * 65}]}, "messages.0.role: .*64"),
    "no role": ({"messages": [{"content": "x"}]}, "messages.0.role: .*required"),
    "all messages": ({"messages": [{"role": "u", "content": "x" * (MAX_PROMPT_CHARS // 2 + 1)}] * 2}, "4194304"),
    "further fields": ({"messages": [MESSAGE | {"name": "x" * MAX_PROMPT_CHARS}]}, "4194304"),
    "further values": ({"messages": [MESSAGE | {"tool_calls": [0] * (MAX_MESSAGE_VALUES - 1)}]}, "32768 values"),
    "values of all messages": (
        {"messages": [MESSAGE | {"tool_calls": [[]] * (MAX_MESSAGE_VALUES // 2 - 2)}] * 2 + [MESSAGE | {"a": [1]}]},
        "32768 values",
    ),
    "priority": ({"prompt": "x", "priority": 101}, "priority: .*100"),
    "least priority": ({"prompt": "x", "priority": -101}, "priority: .*-100"),
    "deadline_ms": ({"prompt": "x", "deadline_ms": MAX_DEADLINE_MS + 1}, "deadline_ms: .*86400000"),
    "least deadline_ms": ({"prompt": "x", "deadline_ms": 0}, "deadline_ms: .*1"),
    "model": ({"prompt": "x", "model": "m" * 129}, "model: .*pattern"),
    "model with a colon": ({"prompt": "x", "model": "a:b"}, "model: .*pattern"),
    "model with a line": ({"prompt": "x", "model": "a\n"}, "model: .*pattern"),
    "tenant": ({"prompt": "x", "tenant": "t" * 129}, "tenant: .*128"),
    "trace": ({"prompt": "x", "trace": TRACE + "0"}, "trace: .*pattern"),
    "unknown": ({"prompt": "x", "n_predict": 1}, "n_predict: .*not permitted"),
    "unknown in sampling": (sampling(max_token=1), "sampling.max_token: .*not permitted"),
    "max_tokens": (sampling(max_tokens=MAX_TOKENS + 1), "sampling.max_tokens: .*1048576"),
    "least max_tokens": (sampling(max_tokens=0), "sampling.max_tokens: .*1"),
    "max_tokens with a fraction": (sampling(max_tokens=1.5), "sampling.max_tokens: .*integer"),
    "temperature": (sampling(temperature=100.1), "sampling.temperature: .*100"),
    "temperature of 1e9": (sampling(temperature=1e9), "sampling.temperature: .*100"),
    "negative temperature": (sampling(temperature=-1), "sampling.temperature: .*0"),
    "NaN": (sampling(temperature=math.nan), "sampling.temperature: .*finite"),
    "infinity": (sampling(temperature=math.inf), "sampling.temperature: .*finite"),
    "top_k": (sampling(top_k=-1), "sampling.top_k: .*0"),
    "top_p": (sampling(top_p=1.01), "sampling.top_p: .*1"),
    "top_p of 0": (sampling(top_p=0), "sampling.top_p: .*0"),
    "top_p of NaN": (sampling(top_p=math.nan), "sampling.top_p: .*finite"),
    "stop": (sampling(stop=["s"] * (MAX_STOP_STRINGS + 1)), "sampling.stop: .*16"),
    "long stop": (sampling(stop=["s" * (MAX_STOP_CHARS + 1)]), "sampling.stop: .*256"),
    "empty stop": (sampling(stop=[""]), "sampling.stop: .*1 to 256"),
    "stop_token_ids": (sampling(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)), "sampling.stop_token_ids: .*128"),
    "negative stop token": (sampling(stop_token_ids=[-1]), "sampling.stop_token_ids.0: .*0"),
    "seed": (sampling(seed=MAX_SEED + 1), "sampling.seed: .*9223372036854775807"),
    "negative seed": (sampling(seed=-1), "sampling.seed: .*0"),
}

WITHOUT_A_PROMPT = {
    "nothing": {},
    "empty text": {"prompt": ""},
    "empty ids": {"prompt_token_ids": []},
    "no messages": {"messages": []},
    "a list with an empty text": {"prompt": [""]},
    "two prompts": {"prompt": "x", "prompt_token_ids": [1]},
    "three prompts": {"prompt": "x", "prompt_token_ids": [1], "messages": [MESSAGE]},
}

SURROGATES = {
    "prompt": {"prompt": "hi \ud800 x"},
    "content": {"messages": [{"role": "user", "content": "hi \ud800 x"}]},
    "role": {"messages": [{"role": "\udfff", "content": "x"}]},
    "a further field": {"messages": [MESSAGE | {"name": "\ud800"}]},
    "deep in a further field": {"messages": [MESSAGE | {"tool_calls": [{"a": {"b": "\ud800"}}]}]},
    "a field's name": {"messages": [MESSAGE | {"\ud800": 1}]},
    "stop": sampling(stop="\ud800"),
    "tenant": {"prompt": "x", "tenant": "\ud800"},
    "an unknown field": {"prompt": "x", "\ud800": 1},
}


@pytest.mark.parametrize("fields", AT_THE_LIMIT.values(), ids=AT_THE_LIMIT.keys())
def test_at_the_limit_it_is_taken(fields: dict[str, Any]) -> None:
    request = build_request(fields)
    assert GenerateRequest.model_validate_json(request.model_dump_json(exclude_defaults=True)) == request


@pytest.mark.parametrize(("fields", "message"), PAST_THE_LIMIT.values(), ids=PAST_THE_LIMIT.keys())
def test_past_the_limit_the_message_names_field_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build_request(fields)


@pytest.mark.parametrize("fields", WITHOUT_A_PROMPT.values(), ids=WITHOUT_A_PROMPT.keys())
def test_exactly_one_prompt_must_be_given(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt|messages"):
        build_request(fields)


@pytest.mark.parametrize("fields", SURROGATES.values(), ids=SURROGATES.keys())
def test_a_lone_surrogate_is_refused_wherever_it_stands(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(fields)
    str(caught.value).encode()


@pytest.mark.parametrize("text", ["a\u0000b", "\ufffd", "\U0010ffff", "\r\n"])
def test_every_real_character_is_taken(text: str) -> None:
    assert build_request(text).prompt == text
    assert build_request(messages=[{"role": "user", "content": text}]).messages[0].content == text


@pytest.mark.parametrize("value", [math.nan, {"a": [math.inf]}, object(), (1,), {1: 2}])
def test_further_fields_of_a_message_must_be_json(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.0"):
        build_request(messages=[MESSAGE | {"extra": value}])


def test_a_value_that_is_nested_too_deep_is_refused() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidRequest):
        build_request(messages=[MESSAGE | {"extra": value}])


def test_further_fields_of_a_message_are_kept() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "arguments": {"x": [1, 2.5, None]}}]}
    request = build_request(messages=[message])
    assert request.model_dump(mode="json", exclude_defaults=True)["messages"] == [
        {"role": "assistant", "tool_calls": message["tool_calls"]}
    ]


SECRET = "the-secret-prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": SECRET, "priority": SECRET, "sampling": {"stop": [SECRET * 30], "temperature": SECRET}},
        {"prompt": {"text": SECRET}},
        {"messages": [{"role": "user", "content": [SECRET]}]},
        {"messages": SECRET},
        {"prompt": SECRET, "prompt_token_ids": [1]},
    ],
)
def test_a_message_never_repeats_what_was_sent(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(fields)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "the traceback would show pydantic's message"


def test_a_message_stays_short() -> None:
    with pytest.raises(InvalidRequest, match="and 997 more") as caught:
        build_request({"prompt": "x"} | {"n" * 1000 + str(number): number for number in range(1000)})
    assert len(str(caught.value)) < 500


def test_requests_and_sampling_are_values() -> None:
    request = build_request("x")
    with pytest.raises(ValueError, match="frozen"):
        request.prompt = "y"
    assert request.sampling == Sampling()


@given(st.text(max_size=70))
def test_an_id_is_good_exactly_if_it_is_short_and_plain(text: str) -> None:
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert is_request_id(text) == (1 <= len(text) <= 64 and set(text) <= plain)


@pytest.mark.parametrize("text", ["", "a" * 65, "a:b", "a b", "a\n", "é", "a*", "{a}"])
def test_bad_ids(text: str) -> None:
    assert not is_request_id(text)


def test_new_ids_are_ids_and_differ() -> None:
    ids = {new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(map(is_request_id, ids))


@given(st.text(max_size=200))
def test_every_served_name_is_a_model_name(text: str) -> None:
    assert build_request("x", model=served_name(text)).model == served_name(text)
    assert MODEL_PATTERN.endswith("$")
