"""One request between its start and its end: what its user has of it, and where it stands in the child.

It holds all that it takes to give the request to a child again. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from .admission import Admitted
from .pipe import Add, Stats
from .request import Delta, FinishReason
from .stream import Sink

#: Called once when the child holds nothing of a request any more, with its counters then; None if the child died.
OnFreed = Callable[[Stats | None], None]


class PausedBy(Enum):
    """Why a request is paused: it goes on when no reason is left."""

    USER = auto()
    READER = auto()  #: its stream holds too much that was not read


class Place(Enum):
    OUT = auto()  #: not in the child, nor in a step of it
    RUNNING = auto()  #: in the child, in its line or in its steps
    HELD = auto()  #: in the child, told to be left out of steps


@dataclass(slots=True, eq=False)
class TrackedRequest:
    request_id: str
    key: int
    sink: Sink
    resumes: bool = False  #: it has output of an earlier run, whose text is not known yet
    is_aborted: bool = False  #: while it resumed: its id is not its own any more
    admitted: Admitted | None = None  #: None until it was launched
    generated: list[int] = field(default_factory=list)  #: all of its output that was delivered
    num_chars: int = 0
    paused: set[PausedBy] = field(default_factory=set)
    place: Place = Place.OUT
    unanswered_pauses: int = 0
    on_freed: list[OnFreed] = field(default_factory=list)

    def launch(self, admitted: Admitted) -> None:
        self.admitted = admitted
        self.resumes = False
        self.generated = list(admitted.generated_token_ids)
        self.num_chars = admitted.num_chars

    @property
    def may_be_in_a_step(self) -> bool:
        """False as soon as the child has said that it leaves the request out."""
        return self.place is Place.RUNNING or self.unanswered_pauses > 0

    def message(self) -> Add:
        """What a child needs to go on with this request."""
        assert self.admitted is not None, "only a launched request has a place"
        return Add(self.key, self.admitted.prompt_token_ids, self.admitted.sampling, list(self.generated))

    def delta(self, text: str, token_ids: tuple[int, ...], reason: FinishReason | None) -> Delta:
        """The next delta, put behind all that came before it."""
        delta = Delta(len(self.generated), self.num_chars, text, token_ids, reason)
        self.generated += token_ids
        self.num_chars += len(text)
        return delta

    def last_words(self) -> tuple[str, FinishReason]:
        """The text and the reason of an end that comes without the child."""
        if self.admitted is None:
            return "", FinishReason.CANCELLED
        end = self.admitted.end
        if end is not None and end.finish_reason is not None:
            return end.text, end.finish_reason
        return self.admitted.output.flush(), FinishReason.CANCELLED

    def tell_freed(self, stats: Stats | None) -> None:
        on_freed, self.on_freed = self.on_freed, []
        for callback in on_freed:
            callback(stats)
