"""The pipe between the engine's two sides: what can be said, and how it is framed.

A frame is a length (4 bytes, big endian) and one JSON array `[kind, fields...]`. Requests go by a number that the
parent never uses twice, so that nothing that is on its way can hit a later request of the same id. This file opens
no socket and knows neither text nor tensors; both sides and every stand-in for the child import it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Final, get_args

_LENGTH: Final = struct.Struct(">I")
#: A frame is at most this long: a prompt of a million tokens fits, garbage does not.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


class PipeError(Exception):
    """What came through the pipe is not a frame of this protocol."""


@dataclass(frozen=True, slots=True)
class Add:
    """Down: a request. `sampling` holds the fields of SamplingParams without `stop`.

    `generated_token_ids` are output that it has already: the next token is the one behind them.
    """

    kind: ClassVar[str] = "add"
    key: int
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    generated_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Abort:
    """Down: forget the request. An unknown key is no error. Answered by Freed, if no Stop comes first."""

    kind: ClassVar[str] = "abort"
    key: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Down: leave the request out of steps, with its blocks kept, until Resume. Answered by Paused, like Abort."""

    kind: ClassVar[str] = "pause"
    key: int


@dataclass(frozen=True, slots=True)
class Resume:
    kind: ClassVar[str] = "resume"
    key: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Down: answered by Pong before the next step, so that a step which never ends is noticed."""

    kind: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class Stop:
    """Down: end the process in good order, whatever still runs."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class Ready:
    """Up, once: the model is loaded and these are its facts.

    `text_dir` is a folder with tokenizer.json and, where the model has them, tokenizer_config.json and
    chat_template.jinja.
    """

    kind: ClassVar[str] = "ready"
    model: str
    text_dir: str
    eos_token_ids: list[int]
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    attention: str

    def output_limit(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens a request may generate: what was asked for, but no more than the context has room for.

        Where nothing was asked for, also no more than the pool could hold.
        """
        room = self.max_model_len - num_prompt_tokens
        if max_tokens is not None:
            return min(room, max_tokens)
        return max(1, min(room, self.num_blocks * self.block_size + 1 - num_prompt_tokens))

    def stop_ids(self, stop_token_ids: Iterable[int], *, ignore_eos: bool) -> frozenset[int]:
        """The tokens that end a request."""
        return frozenset(stop_token_ids).union(() if ignore_eos else self.eos_token_ids)


@dataclass(frozen=True, slots=True)
class Stats:
    """The child's own counters after a step or an abort."""

    step: int  #: steps run so far
    running: int
    waiting: int
    used_blocks: int
    free_blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Step:
    """Up, for each step that produced something: `outputs` are [key, token ids, finish reason or null]."""

    kind: ClassVar[str] = "step"
    outputs: list[list[Any]]
    stats: Stats


@dataclass(frozen=True, slots=True)
class Refused:
    """Up: the request was not taken, or failed alone. `invalid`: it is the request's own fault."""

    kind: ClassVar[str] = "refused"
    key: int
    message: str
    invalid: bool


@dataclass(frozen=True, slots=True)
class Freed:
    """Up: the request has ended, or its abort was applied, and no step holds it or its blocks."""

    kind: ClassVar[str] = "freed"
    key: int
    stats: Stats


@dataclass(frozen=True, slots=True)
class Paused:
    """Up: the pause was applied, and no step has the request in it."""

    kind: ClassVar[str] = "paused"
    key: int


@dataclass(frozen=True, slots=True)
class Pong:
    kind: ClassVar[str] = "pong"


@dataclass(frozen=True, slots=True)
class Log:
    """Up: a line for the parent's log."""

    kind: ClassVar[str] = "log"
    level: str
    event: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fatal:
    """Up, last: the process ends because of this. `setting` is the one of EngineConfig whose fault it is, if any."""

    kind: ClassVar[str] = "fatal"
    message: str
    setting: str | None = None


Down = Add | Abort | Pause | Resume | Ping | Stop
Up = Ready | Step | Refused | Freed | Paused | Pong | Log | Fatal
_KINDS: Final[dict[str, Any]] = {cls.kind: cls for cls in (*get_args(Down), *get_args(Up))}


def encode(message: Down | Up) -> bytes:
    """One frame. Raises PipeError for a message over MAX_FRAME_BYTES."""
    values = [asdict(v) if isinstance(v, Stats) else v for v in (getattr(message, f.name) for f in fields(message))]
    body = json.dumps([message.kind, *values], separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise PipeError(f"a {message.kind} message of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Turns bytes as they arrive into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields each Down or Up message that is complete. Raises PipeError for what is not one."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise PipeError(f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _decode(body)


def _decode(body: bytes) -> Down | Up:
    try:
        kind, *values = json.loads(body)
        cls = _KINDS[kind]
        if cls in (Step, Freed):
            values[-1] = Stats(**values[-1])
        message: Down | Up = cls(*values)
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise PipeError(f"not a message: {body[:80]!r}") from exc
    return message
