"""The wire, frozen byte for byte: a change of what stands in Redis must show as a diff of a file in `wire/`.

Running workers and web apps of other versions, and readers in other languages, go by these bytes. To change them on
purpose, run `INFERQ_UPDATE_GOLDEN=1 pytest tests/golden`, read the diff, and say in the changelog what changed.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from pathlib import Path

import pytest
import redis.asyncio
from support.wire import Wire

from inferq.producer.contract import Keys
from inferq.producer.events import (
    EVENT_TYPES,
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
from inferq.producer.payload import build_request, encode_payload, fingerprint
from inferq.producer.requests import GenerateRequest, Sampling

WIRE = Path(__file__).with_name("wire")

EVENTS: dict[str, Event] = {
    "queued": Queued(v=1, generation=1764000000000000, enqueued_at_ms=1764000000000),
    "queued-full": Queued(
        v=1, generation=1764000000000000, enqueued_at_ms=1764000000000, trace=f"00-{'a' * 32}-{'b' * 16}-01"
    ),
    "started": Started(attempt=1, worker="host-1-abc", resumed_tokens=(0,), queue_ms=2.5),
    "started-full": Started(
        attempt=2, worker="host-1-abc", resumed_tokens=(42, 40), queue_ms=2.5, prompt_tokens=12, cached_tokens=8
    ),
    "prompt": Prompt(text="é"),
    "prompt-full": Prompt(text="é", prompt_logprobs=[None, {"id": 7, "logprob": -0.5}]),
    "delta": Delta(index=0, at=0, text='He said "🦙"\n', token_ids=(1, 2)),
    "delta-full": Delta(
        choice=1,
        index=40,
        at=171,
        text="",
        token_ids=(49151,),
        logprobs=[{"id": 49151, "logprob": -1.25}],
        finish_reason=FinishReason.STOP,
    ),
    "finished": Finished(finish_reasons=(FinishReason.DEADLINE,)),
    "finished-full": Finished(
        finish_reasons=(FinishReason.STOP, FinishReason.LENGTH),
        usage=Usage(prompt_tokens=12, completion_tokens=82, cached_tokens=8),
        timings=Timings(queue_ms=2.5, ttft_ms=31.0, total_ms=1200.25),
    ),
    "failed": Failed(code=ErrorCode.INVALID_REQUEST, message="the prompt has 9000 tokens", attempts=0),
}

FULL_REQUEST = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "arguments": {"city": "Orléans"}}]},
        {"role": "tool", "content": "🦙", "name": "weather"},
    ],
    "sampling": {
        "max_tokens": 100,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "stop": ["\n\n", "END"],
        "stop_token_ids": [2],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 2**63 - 1,
    },
    "priority": 5,
    "deadline_ms": 60_000,
    "model": "demo",
    "tenant": "acme",
    "trace": f"00-{'a' * 32}-{'b' * 16}-01",
}


def compare(name: str, written: str) -> None:
    file = WIRE / name
    found = written.encode() + b"\n"
    if os.environ.get("INFERQ_UPDATE_GOLDEN"):
        file.write_bytes(found)
    frozen = file.read_bytes() if file.exists() else b"(there is no such file)"
    assert found == frozen, (
        f"The wire has changed: {file} no longer holds what is written. If that is on purpose, run "
        f"`INFERQ_UPDATE_GOLDEN=1 pytest tests/golden`, read the diff, and note it in CHANGELOG.md."
    )


@pytest.mark.parametrize("name", EVENTS)
def test_events(name: str) -> None:
    kind, data = encode_event(EVENTS[name])
    assert kind == name.partition("-")[0]
    compare(f"{name}.json", data)


def test_what_the_worker_writes_for_a_token() -> None:
    delta = EVENTS["delta"]
    assert isinstance(delta, Delta)
    _, data = encode_delta(**delta.model_dump(include={"index", "at", "text", "token_ids", "finish_reason"}))
    compare("delta.json", data)


def test_every_event_is_frozen() -> None:
    assert {event.type for event in EVENTS.values()} == EVENT_TYPES


def test_every_frozen_file_is_compared() -> None:
    compared = {f"{name}.json" for name in EVENTS} | {"payload.json", "keys.json", "codes.json", "fingerprint.txt"}
    assert {file.name for file in WIRE.iterdir()} == compared


def test_a_full_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_764_000_000_123_456_789)
    request = build_request(FULL_REQUEST)
    unset = {"prompt", "prompt_token_ids"}
    assert request.model_fields_set == set(GenerateRequest.model_fields) - unset, "a new field is not frozen yet"
    assert request.sampling.model_fields_set == set(Sampling.model_fields), "a new field is not frozen yet"
    compare("payload.json", encode_payload(request).decode())


def test_the_fingerprint() -> None:
    """It is compared across versions, when a request comes again under its idempotency key."""
    compare("fingerprint.txt", fingerprint(build_request(FULL_REQUEST)))


def test_key_names() -> None:
    keys = Keys("demo")
    names = {}
    for name, member in inspect.getmembers(Keys):
        if isinstance(member, property):
            names[name] = getattr(keys, name)
        elif inspect.isfunction(member) and not name.startswith("_"):
            names[name] = getattr(keys, name)("{worker}" if name == "worker" else "{id}")
    compare("keys.json", json.dumps(names, indent=1, sort_keys=True))


def test_closed_sets() -> None:
    sets = {"finish_reasons": list(FinishReason), "error_codes": list(ErrorCode), "event_types": sorted(EVENT_TYPES)}
    compare("codes.json", json.dumps(sets, indent=1))


async def test_what_scripts_write_has_the_same_form(client: redis.asyncio.Redis) -> None:
    """Scripts put their events together by hand: they must say neither more nor less than the models do."""
    wire = Wire(client)
    await wire.claimed("a", trace=f"00-{'a' * 32}-{'b' * 16}-01")
    await wire.redis.delete(wire.keys.payload("a"))
    await wire.lapse("a")
    await wire.claim()
    await wire.enqueue("b")
    await wire.producer.cancel("b")
    await wire.enqueue("c", deadline_ms=1)
    await wire.pass_deadline("c")
    await wire.producer.expire()
    entries = [entry for request_id in "abc" for entry in await wire.entries(request_id)]
    assert {fields[b"t"] for _, fields in entries} == {b"queued", b"started", b"finished", b"failed"}
    for entry_id, fields in entries:
        event = decode_event(fields)
        assert json.loads(fields[b"d"]) == json.loads(encode_event(event)[1]), entry_id
