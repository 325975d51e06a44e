"""What a caller passes, and the payload, the fingerprint and the estimate that become of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from arq.jobs import deserialize_job
from hypothesis import given
from hypothesis import strategies as st

from inferq.producer.contract import MAX_PAYLOAD_BYTES, decode_json, encode_json
from inferq.producer.errors import InvalidRequest
from inferq.producer.payload import build_request, encode_payload, estimate_tokens, fingerprint
from inferq.producer.requests import MAX_PROMPT_CHARS, MAX_SEED, GenerateRequest, Message, Sampling


def request_of(payload: bytes) -> dict[str, Any]:
    return json.loads(payload)["a"][0]


def test_every_way_to_say_the_same_request() -> None:
    expected = GenerateRequest(prompt="hi", sampling=Sampling(max_tokens=3))
    assert build_request("hi", sampling={"max_tokens": 3}) == expected
    assert build_request({"prompt": "hi", "sampling": {"max_tokens": 3}}) == expected
    assert build_request({"prompt": "hi"}, sampling=Sampling(max_tokens=3)) == expected
    assert build_request(prompt="hi", sampling=Sampling(max_tokens=3)) == expected
    assert build_request(expected) is expected
    assert build_request(GenerateRequest(prompt="hi"), sampling={"max_tokens": 3}) == expected


def test_fields_that_are_added_to_a_request_are_checked_too() -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        build_request(GenerateRequest(prompt="hi"), priority=1000)


@pytest.mark.parametrize("request_", [1, b"hi", ["hi"], object()])
def test_what_is_no_request_is_refused(request_: Any) -> None:
    with pytest.raises(InvalidRequest, match="a request is"):
        build_request(request_)


def test_the_payload_is_arqs_own_form() -> None:
    payload = encode_payload(build_request(prompt_token_ids=[1, 2], sampling={"seed": 7}))
    job = deserialize_job(payload, deserializer=decode_json)
    assert job.function == "generate"
    assert job.args == [{"prompt_token_ids": [1, 2], "sampling": {"seed": 7}}]
    assert job.kwargs == {}
    assert job.job_try is None


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {request_of(encode_payload(build_request("x")))["sampling"]["seed"] for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_a_seed_that_is_given_is_kept(seed: int) -> None:
    assert request_of(encode_payload(build_request("x", sampling={"seed": seed})))["sampling"] == {"seed": seed}


@given(st.text(min_size=1), st.lists(st.text(max_size=20), max_size=3))
def test_any_text_comes_through_the_payload(text: str, contents: list[str]) -> None:
    request = build_request(text, sampling={"seed": 1})
    assert GenerateRequest.model_validate(request_of(encode_payload(request))) == request
    chat = build_request(messages=[Message(role="user", content=each) for each in [*contents, text]])
    assert GenerateRequest.model_validate(request_of(encode_payload(chat))).messages == chat.messages


def test_the_same_request_has_the_same_fingerprint() -> None:
    one = fingerprint(build_request({"prompt": "x", "sampling": {"top_k": 3, "max_tokens": 2}}))
    assert one == fingerprint(build_request({"sampling": {"max_tokens": 2, "top_k": 3, "top_p": 1.0}, "prompt": "x"}))
    assert one != fingerprint(build_request({"prompt": "x", "sampling": {"top_k": 3, "max_tokens": 3}}))
    assert one != fingerprint(build_request({"prompt": "x", "sampling": {"top_k": 3, "max_tokens": 2, "seed": 1}}))
    assert len(one) == 64


def test_the_estimate_counts_prompt_and_output() -> None:
    assert estimate_tokens(build_request(prompt_token_ids=[1] * 10, sampling={"max_tokens": 5})) == 15
    assert estimate_tokens(build_request("x" * 9)) == 3
    assert (
        estimate_tokens(build_request(messages=[{"role": "user", "content": "x" * 8}], sampling={"max_tokens": 1})) == 3
    )


def test_what_json_lacks_becomes_its_repr_and_never_code() -> None:
    assert decode_json(encode_json({"e": ValueError("x")})) == {"e": "ValueError('x')"}
    with pytest.raises(ValueError, match="not a JSON object"):
        decode_json(b"[1]")


def test_a_payload_over_the_bound_of_the_wire_is_refused_with_both_numbers() -> None:
    """Three bytes a character: within the bound of a prompt's characters, and over that of the payload."""
    with pytest.raises(InvalidRequest, match=f"bytes as JSON; {MAX_PAYLOAD_BYTES} are allowed"):
        encode_payload(build_request("深" * (MAX_PAYLOAD_BYTES // 3)))
    assert len(encode_payload(build_request("x" * MAX_PROMPT_CHARS))) <= MAX_PAYLOAD_BYTES
