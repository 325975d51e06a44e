"""From what a caller passes to the bytes of arq's payload: one validated request, and what the queue is told about it.

Everything here happens before anything is written. No error message repeats what the caller sent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from arq.jobs import serialize_job
from pydantic import ValidationError

from .contract import FUNCTION, MAX_PAYLOAD_BYTES, encode_json
from .errors import InvalidRequest
from .requests import MAX_SEED, GenerateRequest

#: What a caller may pass: a text to go on from, a request, or a request's fields.
RequestLike = str | GenerateRequest | Mapping[str, Any]

_CHARS_PER_TOKEN: Final = 4  # of English text, roughly, for the usual byte-level vocabularies
#: So many wrong values are counted, not listed: pydantic's list of them costs more than reading the request.
_MAX_DETAILED_ERRORS: Final = 1000
_MAX_NAMED_ERRORS: Final = 3
_MAX_NAME_CHARS: Final = 80


def build_request(request: RequestLike | None = None, **fields: Any) -> GenerateRequest:
    """One validated request. A text is a `prompt`; `fields` add to, or replace, the fields of `request`.

    Raises InvalidRequest that names each wrong field and its limit.
    """
    match request:
        case GenerateRequest() if not fields:
            return request
        case GenerateRequest():
            given: Mapping[str, Any] = request.model_dump(exclude_unset=True)
        case str():
            given = {"prompt": request}
        case None:
            given = {}
        case Mapping():
            given = request
        case _:
            raise InvalidRequest(f"a request is a str, a mapping or a GenerateRequest, not a {type(request).__name__}")
    try:
        return GenerateRequest.model_validate({**given, **fields})
    except ValidationError as exc:
        message = describe(exc)
    raise InvalidRequest(message)  # outside of the handler: pydantic's own message holds the prompt


def describe(error: ValidationError) -> str:
    """Which fields are wrong and what their limits are, without the values."""
    if error.error_count() > _MAX_DETAILED_ERRORS:
        return f"the request has {error.error_count()} wrong fields or values"
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    parts = []
    for each in errors[:_MAX_NAMED_ERRORS]:
        name = ".".join(str(part) for part in each["loc"]).encode("ascii", "backslashreplace").decode()
        text = each["msg"].removeprefix("Value error, ")
        parts.append(f"{name[:_MAX_NAME_CHARS]}: {text}" if name else text)
    if len(errors) > _MAX_NAMED_ERRORS:
        parts.append(f"and {len(errors) - _MAX_NAMED_ERRORS} more")
    return "; ".join(parts)


def encode_payload(request: GenerateRequest) -> bytes:
    """arq's payload of a job: `{"t":null,"f":"generate","a":[{request}],"k":{},"et":ms}`.

    A request without a seed is given one here, so that every attempt of the job draws the same tokens.
    Raises InvalidRequest over MAX_PAYLOAD_BYTES.
    """
    if request.sampling.seed is None:
        sampling = request.sampling.model_copy(update={"seed": secrets.randbelow(MAX_SEED + 1)})
        request = request.model_copy(update={"sampling": sampling})
    enqueued_ms = time.time_ns() // 1_000_000
    payload = serialize_job(FUNCTION, (_as_json(request),), {}, None, enqueued_ms, serializer=encode_json)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"the request has {len(payload)} bytes as JSON; {MAX_PAYLOAD_BYTES} are allowed")
    return payload


def fingerprint(request: GenerateRequest) -> str:
    """SHA-256 of the request in canonical form: the same for the same request, before a seed is drawn for it."""
    canonical = json.dumps(_as_json(request), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def estimate_tokens(request: GenerateRequest) -> int:
    """How many tokens the request may come to hold, roughly: its prompt, and `max_tokens` where that is given.

    The prompt's part is exact for token ids, and a quarter of the characters for text. It orders and shares out
    work; nothing is refused by it.
    """
    if request.prompt_token_ids is not None:
        prompt = len(request.prompt_token_ids)
    else:
        chars = len(request.prompt or "") + sum(message.num_chars for message in request.messages or ())
        prompt = -(-chars // _CHARS_PER_TOKEN)
    return prompt + (request.sampling.max_tokens or 0)


def _as_json(request: GenerateRequest) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_defaults=True)
