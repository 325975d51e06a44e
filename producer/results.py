"""What a producer is told about a request: its whole answer, or how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .events import Delta, FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer of a request that finished."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage | None
    timings: Timings | None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first choice; the one that ended it is among them, though its text is not shown."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        return tuple(choice.finish_reason for choice in self.choices)


class ResultBuilder:
    """Puts the deltas of a request together."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}

    def add(self, delta: Delta) -> None:
        self._texts.setdefault(delta.choice, []).append(delta.text)
        self._token_ids.setdefault(delta.choice, []).extend(delta.token_ids)

    def choices(self, finish_reasons: tuple[FinishReason, ...]) -> tuple[Choice, ...]:
        return tuple(
            Choice("".join(self._texts.get(index, ())), tuple(self._token_ids.get(index, ())), reason)
            for index, reason in enumerate(finish_reasons)
        )


class State(StrEnum):
    """Where a request is in its life."""

    UNKNOWN = "unknown"  #: nothing is known under that id: it never was, or its result has expired
    QUEUED = "queued"  #: accepted; no worker has taken it yet, or it waits to be taken over
    RUNNING = "running"  #: a worker holds its lease
    FINISHED = "finished"  #: ended with an answer, or a part of one: the finish reasons tell
    CANCELLED = "cancelled"  #: ended because somebody cancelled it; the partial answer stands
    FAILED = "failed"  #: ended with an error; the error code tells


TERMINAL_STATES: Final = frozenset({State.FINISHED, State.CANCELLED, State.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far a request has come. What does not apply to its state is None, or empty.

    `position` counts the jobs that wait before it; a job that waits to be taken over has none. How long it will still
    wait is an estimate from the jobs that run now, and None while no worker serves the model.
    """

    request_id: str
    state: State
    model: str | None = None
    position: int | None = None
    estimated_wait_seconds: float | None = None
    attempt: int | None = None
    worker: str | None = None
    finish_reasons: tuple[FinishReason, ...] = ()
    error_code: str | None = None
    error_message: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL_STATES
