"""What somebody may plant under a job's keys: nothing of it is run, and each such job ends with a reason."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from arq.jobs import Job
from support.queue import KEYS, MODEL, answer_to, arq_payload, left_over, put_plain, scripted_worker
from support.streams import until_ended

from inferq.producer import InferenceClient, InferqError, RequestRefused, SigningKeys, connect, decode_json

KEY = "a:0123456789abcdef0123456789abcdef"
WHOLE = '{"t":null,"f":"generate","a":[%s],"k":{},"et":1}'


class Touch:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self.marker, "w")


def pickles(marker: Path) -> dict[str, bytes]:
    """arq's own job with such a thing in each of its places, and the thing alone, in every protocol."""
    job = {"t": None, "f": "generate", "a": [{"prompt": "x"}], "k": {}, "et": 1}
    found = {}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found[f"bare-{protocol}"] = pickle.dumps(Touch(marker), protocol)
        for place in job:
            found[f"in-{place}-{protocol}"] = pickle.dumps(job | {place: Touch(marker)}, protocol)
    return found


#: JSON, or nearly so, that parsers disagree about, or that costs more than it looks.
TEXTS = {
    "deep-lists": WHOLE % ("[" * 50_000 + "]" * 50_000),
    "deep-objects": WHOLE % ('{"a":' * 20_000 + "1" + "}" * 20_000),
    "never-closed": "[" * 100_000,
    "deep-prompt": WHOLE % ('{"prompt":' + "[" * 40_000 + "]" * 40_000 + "}"),
    "huge-integer": WHOLE % ('{"prompt":"x","sampling":{"seed":' + "9" * 4000 + "}}"),
    "integer-over-the-limit": WHOLE % ('{"prompt":"x","sampling":{"seed":' + "9" * 500_000 + "}}"),
    "huge-priority": WHOLE % ('{"prompt":"x","priority":1' + "0" * 400 + "}"),
    "not-a-number": WHOLE % '{"prompt":"x","sampling":{"temperature":NaN}}',
    "not-a-number-elsewhere": (WHOLE % '{"prompt":"x"}').replace('"et":1', '"et":NaN'),
    "infinity": WHOLE % '{"prompt":"x","sampling":{"temperature":-Infinity}}',
    "infinite-exponent": WHOLE % '{"prompt":"x","sampling":{"temperature":1e999}}',
    "same-name-twice": WHOLE % '{"prompt":"x","prompt":"y"}',
    "same-name-twice-above": (WHOLE % '{"prompt":"x"}').replace('"k":{}', '"k":{},"k":{}'),
    "same-name-once-escaped": WHOLE % r'{"prompt":"x","pr\u006fmpt":"y"}',
    "function-twice": (WHOLE % '{"prompt":"x"}').replace('"k":{}', '"k":{},"f":"other"'),
    "lone-surrogate": WHOLE % r'{"prompt":"\ud800"}',
    "two-values": (WHOLE % '{"prompt":"x"}') * 2,
    "a-comment": (WHOLE % '{"prompt":"x"}') + " // x",
    "single-quotes": (WHOLE % '{"prompt":"x"}').replace('"', "'"),
    "raw-newline": WHOLE % '{"prompt":"a\nb"}',
    "function-is-a-list": (WHOLE % '{"prompt":"x"}').replace('"generate"', '["generate"]'),
    "function-is-an-object": (WHOLE % '{"prompt":"x"}').replace('"generate"', '{"__reduce__":1}'),
    "attribute-as-function": (WHOLE % '{"prompt":"x"}').replace('"generate"', '"__class__"'),
    "a-hook-of-arq": (WHOLE % '{"prompt":"x"}').replace('"generate"', '"cron:generate"'),
    "try-is-text": (WHOLE % '{"prompt":"x","sampling":7}').replace('"t":null', '"t":"1"'),
    "keyword": (WHOLE % '{"prompt":"x"}').replace('"k":{}', '"k":{"ctx":{}}'),
    "constructor": WHOLE % '{"prompt":"x","__class__":"os.system","__init__":{"__globals__":1}}',
}
BYTES = {
    "no-utf-8": (WHOLE % '{"prompt":"?"}').encode().replace(b"?", b"\xff\xfe"),
    "overlong-utf-8": (WHOLE % '{"prompt":"?"}').encode().replace(b"?", b"\xc0\xae"),
    "surrogate-in-utf-8": (WHOLE % '{"prompt":"?"}').encode().replace(b"?", b"\xed\xa0\x80"),
    "byte-order-mark": b"\xef\xbb\xbf" + (WHOLE % '{"prompt":"x"}').encode(),
    "utf-16": (WHOLE % '{"prompt":"x"}').encode("utf-16"),
    "utf-16-without-mark": (WHOLE % '{"prompt":"x"}').encode("utf-16-be"),
    "utf-32": (WHOLE % '{"prompt":"x"}').encode("utf-32"),
    "empty": b"",
    "zeros": b"\0" * 1000,
    "message-pack": b"\x85\xa1t\xc0\xa1f\xa8generate\xa1a\x91\x81\xa6prompt\xa1x\xa1k\x80\xa2et\x01",
    "a-zip-of-python": b"PK\x03\x04__main__.py",
    "a-header-of-safetensors": struct.pack("<Q", 2**63) + b"{}",
}
HOSTILE = {name: text.encode() for name, text in TEXTS.items()} | BYTES


def test_one_text_has_one_meaning() -> None:
    """What a gateway in another language may read differently is read by nobody."""
    for name in ("not-a-number", "infinity", "same-name-twice", "same-name-once-escaped", "utf-16", "byte-order-mark"):
        with pytest.raises(ValueError):
            decode_json(HOSTILE[name])
    assert decode_json(b'{"a":{"b":1},"c":{"b":"\xc3\xa9"}}') == {"a": {"b": 1}, "c": {"b": "é"}}


@pytest.mark.parametrize("signed", [False, True])
async def test_what_is_planted_ends_as_a_failed_job(
    redis_url: str, client: redis.asyncio.Redis, tmp_path: Path, signed: bool
) -> None:
    """In the queue as a plain job, and in the place of an accepted job's payload; also by somebody who has a key."""
    marker = tmp_path / "marker"
    planted = pickles(marker) | HOSTILE
    keys = SigningKeys.parse(KEY) if signed else None
    environment = {"INFERQ_SIGNING_KEY": KEY} if signed else {}
    async with InferenceClient.from_url(redis_url, model=MODEL, signing_keys=keys) as producer:
        for name, payload in planted.items():
            if not signed:
                await put_plain(client, payload, f"plain-{name}")
            await producer.submit("to be replaced", request_id=f"ours-{name}")
            await client.set(KEYS.payload(f"ours-{name}"), payload, keepttl=True)
            if keys is not None:
                signature = keys.sign(f"ours-{name}", queue=KEYS.queue, payload=payload)
                await client.hset(KEYS.job(f"ours-{name}"), "signature", signature)
        async with scripted_worker(redis_url, environment=environment) as worker:
            for name in planted:
                for request_id in (f"ours-{name}",) if signed else (f"plain-{name}", f"ours-{name}"):
                    events = await until_ended(client, KEYS, request_id)
                    assert (request_id, events[-1].type) == (request_id, "failed")
                    assert (request_id, events[-1].code) == (request_id, "bad_payload")
                    with pytest.raises(RequestRefused):
                        await producer.result(request_id)
            good = await producer.submit("good", sampling={"max_tokens": 4})
            assert (await producer.result(good)).text == answer_to("good", 4)
            assert await left_over(client) == set()
            assert await producer.dead_letters() == []
            assert worker.process.poll() is None
    assert not marker.exists()


async def test_nothing_that_a_client_reads_is_loaded(
    redis_url: str, client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    """A worker, or whoever writes in its place, has no power over the web app that reads."""
    marker = tmp_path / "marker"
    evil = pickle.dumps(Touch(marker))
    async with InferenceClient.from_url(redis_url, model=MODEL) as producer:
        request_id = await producer.submit("x")
        await client.set(KEYS.card, evil, px=60_000)
        await client.set(KEYS.worker("w"), evil, px=60_000)
        await client.zadd(KEYS.workers, {"w": 1})
        await client.xadd(KEYS.events(request_id), {"t": "delta", "d": evil})
        await client.xadd(KEYS.dead, {"id": "dead", "reason": "engine_crashed", "attempts": 1})
        await client.set(KEYS.dead_payload("dead"), evil, px=60_000)
        for call in (
            producer.status(request_id),
            producer.fleet(),
            producer.dead_letter("dead"),
            producer.requeue("dead"),
            producer.submit("y", request_id=request_id),
            producer.result(request_id, timeout=1),
        ):
            try:
                await call
            except (InferqError, TimeoutError, ValueError) as exc:
                assert b"builtins" not in str(exc).encode()
    async with connect(redis_url) as arq:
        assert arq.job_deserializer is decode_json
        await client.set("arq:result:evil", evil, px=60_000)
        with pytest.raises(Exception, match="unable to deserialize"):
            await Job("evil", arq, _deserializer=arq.job_deserializer).result(timeout=5)
    assert not marker.exists()


def test_a_payload_is_what_arq_itself_writes() -> None:
    """The strict reading refuses nothing that our clients or arq's own write."""
    for prompt in ("", "é\u2028\x00", '"},{"', "\U0001f600" * 100):
        payload = arq_payload(args=[{"prompt": prompt}])
        assert decode_json(payload) == json.loads(payload)
