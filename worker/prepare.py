"""From a job's payload to what the engine takes, and from an exception to the `failed` event it stands for.

All of it is plain functions that may run in a thread. No message quotes a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final, NamedTuple, TypeVar

from arq.cron import CronJob
from arq.jobs import SerializationError, deserialize_job_raw
from arq.worker import Function
from pydantic import ValidationError

from inferq.engine.admission import Prompt
from inferq.engine.errors import EngineCrashedError, EngineOverloadedError, InvalidRequestError
from inferq.engine.request import SamplingParams
from inferq.producer.contract import FUNCTION, decode_json
from inferq.producer.errors import Unsigned
from inferq.producer.events import ErrorCode, Failed
from inferq.producer.payload import describe
from inferq.producer.requests import MAX_PROMPT_TOKENS, MAX_TOKEN_ID, GenerateRequest, Sampling

from .commands import Claimed
from .errors import BadPayload, ServerFull

T = TypeVar("T")
#: A smaller payload is decoded and validated within a millisecond; a larger one goes to a thread.
_INLINE_BYTES: Final = 16 * 1024
#: Decoding and validating hold the interpreter, for a time that goes with the number of values. So many keys, lists and
#: objects, and so many elements besides the token ids, are more than any request of `requests.py` has.
MAX_VALUES: Final = 128 * 1024
#: A string, or what begins a value outside of strings.
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{:,]', re.DOTALL)
_COMMA, _QUOTE = b',"'
_MAX_MESSAGE_CHARS: Final = 1000


class Asked(NamedTuple):
    """What a job asks of the engine."""

    prompt: Prompt
    sampling: SamplingParams
    deadline_ms: int | None  #: of use to a plain arq job only: of others Redis knows when they expire


async def run_where_it_fits(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call `function` here if its input is small, else in a thread, so that the event loop goes on."""
    if size <= _INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def read_call(payload: bytes, functions: Mapping[str, Function | CronJob]) -> tuple[Function | CronJob, Any]:
    """The function that a job names, and its one argument. Raises BadPayload."""
    num_elements = _check_structure(payload)
    try:
        name, args, kwargs, _, _ = deserialize_job_raw(payload, deserializer=decode_json)
    except SerializationError:
        raise BadPayload("the payload is not an arq job in JSON") from None
    function = functions.get(name) if isinstance(name, str) else None
    if function is None:
        raise BadPayload(f"the job calls another function than {FUNCTION!r}")
    if not isinstance(args, list) or len(args) != 1 or kwargs:
        raise BadPayload(f"{FUNCTION!r} takes exactly one argument, the request")
    if num_elements - _num_token_ids(args[0]) > MAX_VALUES:
        raise BadPayload(f"the payload has more than {MAX_VALUES} values besides valid token ids")
    return function, args[0]


def _check_structure(payload: bytes) -> int:
    """How many elements of lists and objects there are, the first of each left out. Raises BadPayload over a bound."""
    num_elements = payload.count(b",")
    if num_elements + sum(payload.count(sign) for sign in (b"[", b"{", b":")) <= MAX_VALUES:
        return num_elements
    num_elements = num_others = 0  # the signs may stand in a text: look closer, in a loop that lets others run
    for match in _STRUCTURE.finditer(payload):
        sign = payload[match.start()]
        if sign == _COMMA:
            num_elements += 1
        elif sign != _QUOTE:
            num_others += 1
        if num_others > MAX_VALUES or num_elements > MAX_VALUES + MAX_PROMPT_TOKENS:
            raise BadPayload(f"the payload has more than {MAX_VALUES} values besides valid token ids")
    return num_elements


def _num_token_ids(request: Any) -> int:
    """How many a prompt of token ids has; 0 if one of them is none, for each of which there would be an error."""
    token_ids = request.get("prompt_token_ids") if isinstance(request, dict) else None
    if not isinstance(token_ids, list):
        return 0
    valid = all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in token_ids)
    return len(token_ids) if valid else 0


def parse(request: Any, claimed: Claimed, model: str) -> Asked:
    """What the engine is asked for by a job of `model`. Raises BadPayload, InvalidRequestError."""
    try:
        parsed = GenerateRequest.model_validate(request)
    except ValidationError as exc:
        raise BadPayload(describe(exc)) from None
    if parsed.model not in (None, model):
        raise InvalidRequestError(f"model: the job stands in the queue of {model!r}, and asks for another model")
    messages = None if parsed.messages is None else [message.model_dump() for message in parsed.messages]
    prompt = Prompt(parsed.prompt, parsed.prompt_token_ids, messages)
    return Asked(prompt, _engine_sampling(parsed.sampling, claimed), parsed.deadline_ms)


def _engine_sampling(sampling: Sampling, claimed: Claimed) -> SamplingParams:
    values = {field.name: getattr(sampling, field.name) for field in fields(SamplingParams)}
    if sampling.seed is None:
        values["seed"] = _own_seed(claimed)
    return SamplingParams(**values)


def _own_seed(claimed: Claimed) -> int:
    """A plain arq producer draws no seed: the job's own is the same for whoever runs it."""
    digest = hashlib.sha256(f"{claimed.request_id}:{claimed.generation}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def failure(exc: Exception, attempts: int) -> Failed:
    """The `failed` event that an exception stands for. Only messages that are written for the user get out."""
    match exc:
        case BadPayload():
            code, message = ErrorCode.BAD_PAYLOAD, str(exc)
        case Unsigned():
            code, message = ErrorCode.UNSIGNED, str(exc)
        case InvalidRequestError():
            code, message = ErrorCode.INVALID_REQUEST, str(exc)
        case EngineCrashedError():
            code, message = ErrorCode.ENGINE_CRASHED, "the engine died twice with this request alone in it"
        case EngineOverloadedError():
            code, message = ErrorCode.INTERNAL, "the engine has as many requests as it accepts"
        case ServerFull():
            code, message = ErrorCode.INTERNAL, "Redis has been full for too long to take the tokens of this request"
        case _:
            code, message = ErrorCode.INTERNAL, f"an unexpected error ended this request ({type(exc).__name__})"
    return Failed(code=code, message=message[:_MAX_MESSAGE_CHARS], attempts=attempts)
