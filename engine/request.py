"""What is asked of the engine and what it answers: plain values, by the standard library alone.

The wire's models are mapped onto these by the worker, so that the engine also runs where nothing but torch and
transformers is installed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, SupportsFloat, TypedDict

from .errors import InvalidRequestError


class FinishReason(StrEnum):
    STOP = "stop"  #: an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  #: max_tokens or the context is used up
    CANCELLED = "cancelled"  #: aborted by its user; what was generated stands


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    `max_tokens` None means the room left in the context. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off.
    `seed` and a token's position are the only inputs to the randomness of its choice. `stop` strings are found by the
    parent, which sees text; everything else is decided in the child, which sees token ids.

    Raises InvalidRequestError for a value of another type or out of its range. Integers and floats may be of any type
    that says it is one, numpy's for example; they are held as Python's own.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidRequestError(f"temperature must be a finite number of at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k must be at least 0, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop strings must not be empty")
        if not 0 <= self.seed < 2**63:
            raise InvalidRequestError(f"seed must be at least 0 and below 2**63, not {self.seed}")

    def _check_types(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            if name != "max_tokens" or self.max_tokens is not None:
                object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {_shown(value)}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in _items("stop", self.stop)):
            raise InvalidRequestError(f"stop must be a sequence of texts, not {_shown(self.stop)}")
        ids = tuple(_integer("stop_token_ids", i) for i in _items("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", ids)


#: Python does not print numbers that are much larger, and so nor do messages about them.
_MAX_BITS: Final = 1024


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)
            if number.bit_length() > _MAX_BITS:
                raise InvalidRequestError(f"{name} is a number of more than {_MAX_BITS} bits")
            return number
    kind = "integers" if name == "stop_token_ids" else "an integer"
    raise InvalidRequestError(f"{name} must be {kind}, not {_shown(value)}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, SupportsFloat) and not isinstance(value, bool | str):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise InvalidRequestError(f"{name} must be a finite number, not {_shown(value)}")


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to print an integer of more than 4300 digits
        return f"a value of type {type(value).__name__}"


def _items(name: str, values: Any) -> Collection[Any]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise InvalidRequestError(f"{name} must be a sequence, not {_shown(values)}")
    return values


class RequestFields(TypedDict, total=False):
    """What the engine's `add_request` takes by keyword."""

    prompt_token_ids: Sequence[int] | None
    messages: Sequence[Mapping[str, Any]] | None
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a request.

    `text` may be empty while a character or a possible stop string is held back; `index` is the place of the first of
    `token_ids` in the output, `at` the code points of the output's text before `text`. The last delta of a request
    carries its `finish_reason`; none follows it.
    """

    index: int
    at: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: everything that the deltas of a request said, put together."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
