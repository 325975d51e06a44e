"""What is asked of the engine and what it answers: plain values, by the standard library alone.

The wire's models are mapped onto these by the worker, so that the engine also runs where nothing but torch and
transformers is installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

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

    Raises InvalidRequestError for a value out of its range.
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


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
