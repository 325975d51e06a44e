"""The names and lifetimes of everything that inferq keeps in Redis, and the encoding of a job's payload.

Together with `requests.py`, `events.py` and the Lua scripts this is the whole wire: producers, workers and readers
in any language agree on that and on nothing else. A key is spelled here and nowhere else.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final

WIRE_VERSION: Final = 1
#: The arq function that a worker registers; plain arq producers call `enqueue_job("generate", request)`.
FUNCTION: Final = "generate"

# Lifetimes. A script never leaves one of these keys without its own.
JOB_TTL_MS: Final = 24 * 3600 * 1000
RESULT_TTL_MS: Final = 3600 * 1000
BELL_TTL_S: Final = 60
BELL_LENGTH: Final = 64
#: A reader of a job that is cancelled when its readers go says that it is there, well within this time.
READER_TTL_MS: Final = 30_000
#: The payload of a dead letter, so that it can be looked at and sent again.
DEAD_TTL_MS: Final = 7 * 24 * 3600 * 1000
DEAD_LENGTH: Final = 10_000

# Bounds. A larger payload is refused, by `submit` and by the claim; one claim takes no further job beyond its bound.
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
MAX_CLAIM_BYTES: Final = 16 * 1024 * 1024

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
MODEL_PATTERN: Final = r"^[A-Za-z0-9._-]{1,128}$"
_MODEL: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


def new_request_id() -> str:
    """A fresh request id: 122 random bits, so that nobody finds a stream by guessing."""
    return uuid.uuid4().hex


def is_request_id(value: str) -> bool:
    return _ID.match(value) is not None


def served_name(model: str) -> str:
    """The name a model is served under when none is given: the last part of the folder or repository."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", model.rstrip("/").rsplit("/", 1)[-1])
    return name[:128] or "model"


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key name of one served model. Braces of the documentation are the arguments of the methods."""

    model: str
    prefix: str = "inferq"

    def __post_init__(self) -> None:
        if not _MODEL.match(self.model):
            raise ValueError(f"model name {self.model!r} must match [A-Za-z0-9._-]{{1,128}}")
        if not _MODEL.match(self.prefix):
            raise ValueError(f"key prefix {self.prefix!r} must match [A-Za-z0-9._-]{{1,128}}")

    @property
    def queue(self) -> str:
        """Waiting jobs only, by their place in the order. This is arq's queue name."""
        return f"{self.prefix}:{self.model}:queue"

    @property
    def running(self) -> str:
        """Leased jobs only; the score is the lease's end in ms."""
        return f"{self.prefix}:{self.model}:running"

    @property
    def deadlines(self) -> str:
        return f"{self.prefix}:{self.model}:deadlines"

    @property
    def bell(self) -> str:
        return f"{self.prefix}:{self.model}:bell"

    @property
    def control(self) -> str:
        """Pub/sub channel: request ids whose cancel key was just written."""
        return f"{self.prefix}:{self.model}:control"

    @property
    def card(self) -> str:
        return f"{self.prefix}:{self.model}:card"

    @property
    def dead(self) -> str:
        """Dead letters: why jobs failed for good, never what stood in them."""
        return f"{self.prefix}:{self.model}:dead"

    @property
    def vtime(self) -> str:
        """Fair queueing: the virtual time of the model and of each tenant."""
        return f"{self.prefix}:{self.model}:vtime"

    @property
    def workers(self) -> str:
        return f"{self.prefix}:workers"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}:worker:{worker}"

    def job(self, request_id: str) -> str:
        return f"{self.prefix}:{request_id}:job"

    def events(self, request_id: str) -> str:
        return f"{self.prefix}:{request_id}:events"

    def cancel(self, request_id: str) -> str:
        return f"{self.prefix}:{request_id}:cancel"

    def reader(self, request_id: str) -> str:
        """Presence of a reader, for a job that is to be cancelled when nobody reads it any more."""
        return f"{self.prefix}:{request_id}:reader"

    def dead_payload(self, request_id: str) -> str:
        """The payload of a dead letter, out of the way of a new job of that id."""
        return f"{self.prefix}:{request_id}:dead_payload"

    def wake(self, reader: str) -> str:
        """A stream of one reading process' own, which it writes to when its blocked read must begin anew."""
        return f"{self.prefix}:{reader}:wake"

    @staticmethod
    def payload(request_id: str) -> str:
        """arq's own name for the job's payload."""
        return f"arq:job:{request_id}"

    @staticmethod
    def lease(request_id: str) -> str:
        """arq's own name for the mark of a running job; here its value is the owner's token."""
        return f"arq:in-progress:{request_id}"


def encode_json(value: Any) -> bytes:
    """arq's job serializer on both ends: JSON, never pickle. What JSON lacks (an exception) becomes its repr."""
    return json.dumps(value, default=repr, separators=(",", ":"), ensure_ascii=False).encode()


def decode_json(data: bytes) -> dict[str, Any]:
    """arq's job deserializer. Raises ValueError for what is not a JSON object in UTF-8 that everybody reads alike."""
    value = json.loads(data.decode(), object_pairs_hook=_object_of, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("the payload is not a JSON object")
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that stands there twice, some parsers take the first value and some the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the payload has a name twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
