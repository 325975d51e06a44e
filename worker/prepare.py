"""From a job's payload to what the engine takes, and from an exception to the `failed` event it stands for.

All of it is plain functions that may run in a thread. No message quotes a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from arq.cron import CronJob
from arq.jobs import SerializationError, deserialize_job_raw
from arq.worker import Function
from pydantic import ValidationError

from inferq.engine.admission import Prompt
from inferq.engine.errors import EngineCrashedError, EngineOverloadedError, InvalidRequestError
from inferq.engine.request import SamplingParams
from inferq.producer.contract import FUNCTION, decode_json
from inferq.producer.events import ErrorCode, Failed
from inferq.producer.requests import GenerateRequest, Sampling

from .commands import Claimed
from .errors import BadPayload, RedisFull

T = TypeVar("T")
#: A smaller payload is decoded and validated within a millisecond; a larger one goes to a thread.
_INLINE_BYTES: Final = 16 * 1024
_MAX_ERRORS: Final = 3
_MAX_MESSAGE_CHARS: Final = 1000


async def run_where_it_fits(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call `function` here if its input is small, else in a thread, so that the event loop goes on."""
    if size <= _INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def read_call(payload: bytes, functions: Mapping[str, Function | CronJob]) -> tuple[Function | CronJob, Any]:
    """The function that a job names, and its one argument. Raises BadPayload."""
    try:
        name, args, kwargs, _, _ = deserialize_job_raw(payload, deserializer=decode_json)
    except SerializationError:
        raise BadPayload("the payload is not an arq job in JSON") from None
    function = functions.get(name) if isinstance(name, str) else None
    if function is None:
        raise BadPayload(f"the job calls another function than {FUNCTION!r}")
    if not isinstance(args, list) or len(args) != 1 or kwargs:
        raise BadPayload(f"{FUNCTION!r} takes exactly one argument, the request")
    return function, args[0]


def parse(request: Any, claimed: Claimed) -> tuple[Prompt, SamplingParams]:
    """What the engine is asked for. Raises BadPayload, InvalidRequestError."""
    try:
        parsed = GenerateRequest.model_validate(request)
    except ValidationError as exc:
        raise BadPayload(_explain(exc)) from None
    messages = None if parsed.messages is None else [message.model_dump() for message in parsed.messages]
    prompt = Prompt(parsed.prompt, parsed.prompt_token_ids, messages)
    return prompt, _engine_sampling(parsed.sampling, claimed)


def _engine_sampling(sampling: Sampling, claimed: Claimed) -> SamplingParams:
    values = {field.name: getattr(sampling, field.name) for field in fields(SamplingParams)}
    if sampling.seed is None:
        values["seed"] = _own_seed(claimed)
    return SamplingParams(**values)


def _own_seed(claimed: Claimed) -> int:
    """A plain arq producer draws no seed: the job's own is the same for whoever runs it."""
    digest = hashlib.sha256(f"{claimed.request_id}:{claimed.generation}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _explain(exc: ValidationError) -> str:
    """What is wrong with which field, without any value."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for error in errors[:_MAX_ERRORS]:
        place = ".".join(str(part) for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    if len(errors) > _MAX_ERRORS:
        lines.append(f"and {len(errors) - _MAX_ERRORS} more")
    return "; ".join(lines)


def failure(exc: Exception, attempts: int) -> Failed:
    """The `failed` event that an exception stands for. Only messages that are written for the user get out."""
    match exc:
        case BadPayload():
            code, message = ErrorCode.BAD_PAYLOAD, str(exc)
        case InvalidRequestError():
            code, message = ErrorCode.INVALID_REQUEST, str(exc)
        case EngineCrashedError():
            code, message = ErrorCode.ENGINE_CRASHED, "the engine died twice with this request alone in it"
        case EngineOverloadedError():
            code, message = ErrorCode.INTERNAL, "the engine has as many requests as it accepts"
        case RedisFull():
            code, message = ErrorCode.INTERNAL, "Redis is full, and has refused this answer for too long"
        case _:
            code, message = ErrorCode.INTERNAL, f"an unexpected error ended this request ({type(exc).__name__})"
    return Failed(code=code, message=message[:_MAX_MESSAGE_CHARS], attempts=attempts)
