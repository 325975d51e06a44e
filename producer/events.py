"""The events of a stream: what each entry says, and how it is written and read.

Readers ignore types and fields they do not know, so that a newer worker never breaks an older web app.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class FinishReason(StrEnum):
    """Why a choice has no further tokens."""

    STOP = "stop"  #: an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  #: max_tokens or the context is used up
    CANCELLED = "cancelled"  #: somebody cancelled it; the partial text stands
    DEADLINE = "deadline"  #: its deadline passed; the partial text stands


class ErrorCode(StrEnum):
    """Why a job failed. The set is closed: readers may match on it."""

    INVALID_REQUEST = "invalid_request"  #: only a tokenizer, the pool or the model could tell
    BAD_PAYLOAD = "bad_payload"  #: what stood in Redis was not a job of ours
    UNSIGNED = "unsigned"  #: signatures are required, and this one is missing or wrong
    PAYLOAD_LOST = "payload_lost"  #: the payload was gone when a worker came for it
    ENGINE_CRASHED = "engine_crashed"  #: the engine died with this request in flight
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"  #: its workers died as often as is allowed
    INTERNAL = "internal"  #: our fault


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(_Data):
    """Tokens of the whole request, over all its attempts. `cached_tokens` are those of the prompt that cost no work."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timings(_Data):
    """Milliseconds, by the worker's clock except `queue_ms`, which is by Redis'. None: it never came to that."""

    queue_ms: float
    ttft_ms: float | None = None
    total_ms: float


class _Event(_Data):
    """What a stream entry says; `type` is its `t` field, the others are its `d` object."""


class Queued(_Event):
    """The job was accepted. The stream exists exactly from then on; `generation` grows with each job of the same id."""

    type: Literal["queued"] = "queued"
    v: int
    generation: int
    enqueued_at_ms: int
    trace: str | None = None


class Started(_Event):
    """A worker took the job. `resumed_tokens` counts, for each choice, the tokens that earlier attempts published."""

    type: Literal["started"] = "started"
    attempt: int
    worker: str
    resumed_tokens: tuple[int, ...]
    queue_ms: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Prompt(_Event):
    """What was asked for about the prompt itself: its text, its log probabilities."""

    type: Literal["prompt"] = "prompt"
    text: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Delta(_Event):
    """What was added to one choice. The choice's last delta carries its `finish_reason`."""

    type: Literal["delta"] = "delta"
    choice: int = 0
    index: int  #: of its first token, in that choice
    at: int  #: code points of that choice's text before it
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: FinishReason | None = None


class Finished(_Event):
    """Terminal: the answer is complete, or was cut off for the reasons given, one a choice."""

    type: Literal["finished"] = "finished"
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage | None = None
    timings: Timings | None = None


class Failed(_Event):
    """Terminal: there will be no answer. `message` is for people, `code` for programs."""

    type: Literal["failed"] = "failed"
    code: ErrorCode
    message: str
    attempts: int


class NoWorker(_Data):
    """Not an entry of the stream: what a reader is told when the request waits and nobody is there to take it.

    The request goes on when a worker that serves the model comes.
    """

    type: Literal["no_worker"] = "no_worker"
    model: str


Event = Annotated[Queued | Started | Prompt | Delta | Finished | Failed, Field(discriminator="type")]
#: What reading a stream yields.
StreamEvent = Event | NoWorker
TerminalEvent = Finished | Failed
TERMINAL_TYPES: Final = frozenset({"finished", "failed"})
_MODELS: Final[dict[str, type[Event]]] = {
    "queued": Queued,
    "started": Started,
    "prompt": Prompt,
    "delta": Delta,
    "finished": Finished,
    "failed": Failed,
}
EVENT_TYPES: Final = frozenset(_MODELS)

_quote: Final = json.JSONEncoder(ensure_ascii=False).encode


def encode_event(event: _Event) -> tuple[str, str]:
    """The two fields of a stream entry: `t`, the type, and `d`, a JSON object."""
    return event.type, event.model_dump_json(exclude={"type"}, exclude_none=True)  # type: ignore[attr-defined]


def encode_delta(
    *, index: int, at: int, text: str, token_ids: Iterable[int], finish_reason: FinishReason | None
) -> tuple[str, str]:
    """What `encode_event` makes of a Delta of the first choice, in a sixth of its time: there is one for each token."""
    ids = ",".join(map(str, token_ids))
    end = "" if finish_reason is None else f',"finish_reason":"{finish_reason.value}"'
    return "delta", f'{{"choice":0,"index":{index},"at":{at},"text":{_quote(text)},"token_ids":[{ids}]{end}}}'


def decode_event(fields: Mapping[bytes, bytes]) -> Event | None:
    """The event of a stream entry; None for a type this version does not know.

    Raises ValueError for an entry of a known type whose data does not fit it.
    """
    model = _MODELS.get(fields.get(b"t", b"").decode())
    if model is None:
        return None
    data = fields.get(b"d", b"null")
    try:
        return model.model_validate_json(data)
    except ValidationError:
        match json.loads(data):
            case {"type": _, **known}:  # in `d` that is a field like any other that nobody knows
                return model.model_validate(known)
        raise
