"""Stand-ins for what the tracker stands between: a text side, a sink, and the child as far as a request can see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inferq.engine.admission import Admitted
from inferq.engine.detokenizer import Piece
from inferq.engine.errors import EngineError
from inferq.engine.pipe import Abort, Add, Down, Freed, Pause, Paused, Resume, Stats, Step
from inferq.engine.request import Delta, FinishReason

SAMPLING = {"max_tokens": 16}


class PlainOutput:
    """A token id is a code point. The text of the last token is held back; `stop` ends the request."""

    def __init__(self, stop: str = "", fail_at: str = "") -> None:
        self.stop = stop
        self.fail_at = fail_at
        self.held = ""

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        used: list[int] = []
        text = self.held
        for token_id in token_ids:
            used.append(token_id)
            if chr(token_id) == self.fail_at:
                raise ValueError("the detokenizer broke")
            if chr(token_id) == self.stop:
                finish_reason = FinishReason.STOP
                break
            text += chr(token_id)
        self.held = "" if finish_reason else text[-1:]
        return Piece(text if finish_reason else text[:-1], tuple(used), finish_reason)

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


def admitted(stop: str = "", fail_at: str = "") -> Admitted:
    return Admitted([1, 2, 3], [], SAMPLING, PlainOutput(stop, fail_at))  # type: ignore[arg-type]


@dataclass
class ListSink:
    """Keeps what it was given, and raises when it was told to."""

    deltas: list[Delta] = field(default_factory=list)
    errors: list[EngineError] = field(default_factory=list)
    put_error: Exception | None = None
    fail_error: Exception | None = None

    def put(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if self.put_error is not None:
            raise self.put_error

    def fail(self, error: EngineError) -> None:
        self.errors.append(error)
        if self.fail_error is not None:
            raise self.fail_error

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def num_ends(self) -> int:
        return len(self.errors) + sum(delta.finish_reason is not None for delta in self.deltas)

    def check_contiguous(self) -> None:
        """Every delta stands where those before it ended."""
        num_tokens = num_chars = 0
        for delta in self.deltas:
            assert (delta.index, delta.at) == (num_tokens, num_chars)
            num_tokens += len(delta.token_ids)
            num_chars += len(delta.text)


class ChildModel:
    """What the parent may expect of any child: an inbox in order, one block a request, Freed after each end, Paused."""

    def __init__(self) -> None:
        self.inbox: list[Down] = []
        self.ends: list[Freed] = []  #: of requests that a step has ended; said with the next answers
        self.running: set[int] = set()
        self.paused: set[int] = set()
        self.steps = 0

    def send(self, message: Down) -> None:
        self.inbox.append(message)

    def drain(self) -> list[Freed | Paused]:
        """Apply all that was sent; what is said besides steps."""
        answers: list[Freed | Paused] = [*self.ends]
        self.ends.clear()
        while self.inbox:
            match self.inbox.pop(0):
                case Add(key):
                    assert key not in self.running, "a key was used twice"
                    self.running.add(key)
                case Abort(key):
                    self.forget(key)
                    answers.append(Freed(key, self.stats()))
                case Pause(key):
                    self.paused.add(key)
                    answers.append(Paused(key))
                case Resume(key):
                    self.paused.discard(key)
        return answers

    def forget(self, key: int) -> None:
        self.running.discard(key)
        self.paused.discard(key)

    def step(self, outputs: list[tuple[int, str, FinishReason | None]]) -> Step:
        self.steps += 1
        for key, _, reason in outputs:
            if reason is not None:
                self.forget(key)
                self.ends.append(Freed(key, self.stats()))
        return Step([[key, [ord(c) for c in text], reason] for key, text, reason in outputs], self.stats())

    def stats(self) -> Stats:
        used = len(self.running)
        return Stats(self.steps, used, 0, used, 1000 - used, 0)


class MortalChild:
    """A child whose steps kill it when a poison is in them. `inbox` and `outbox` hold what is on its way.

    One that looks ahead launches a step before it knows whom the step before has ended: that has them in it, too.
    """

    NUM_TOKENS = 80

    def __init__(self, poisons: set[int], *, looks_ahead: bool = False) -> None:
        self.inbox: list[Down] = []
        self.outbox: list[Step | Freed | Paused] = []
        self.running: dict[int, int] = {}  #: how many tokens of its answer a request has
        self.paused: set[int] = set()
        self.ending: set[int] = set()  #: ended, and in the step on its way
        self._poisons = poisons
        self._looks_ahead = looks_ahead

    @staticmethod
    def answer(key: int) -> list[int]:
        """All tokens of a request, wherever it is taken up."""
        return [ord("a") + (7 * key + place) % 26 for place in range(MortalChild.NUM_TOKENS)]

    def able(self) -> set[int]:
        """Who takes part in steps."""
        return set(self.running) - self.paused

    def apply(self, count: int | None = None) -> None:
        """Read so many messages of the inbox, or all."""
        for _ in range(len(self.inbox) if count is None else min(count, len(self.inbox))):
            match self.inbox.pop(0):
                case Add(key, generated_token_ids=generated):
                    assert key not in self.running, "a child was given a request twice"
                    assert generated == self.answer(key)[: len(generated)]
                    self.running[key] = len(generated)
                case Abort(key):
                    self.running.pop(key, None)
                    self.paused.discard(key)
                    self.outbox.append(Freed(key, self._stats()))
                case Pause(key):
                    if key in self.running:
                        self.paused.add(key)
                    self.outbox.append(Paused(key))
                case Resume(key):
                    self.paused.discard(key)

    def step(self, num_tokens: int) -> bool:
        """Every able request gets so many tokens. False if that is its death."""
        if self._poisons & (self.able() | self.ending):
            return False
        outputs: list[list[object]] = []
        ended: set[int] = set()
        for key in sorted(self.able()):
            token_ids = self.answer(key)[self.running[key] :][:num_tokens]
            self.running[key] += len(token_ids)
            if self.running[key] == self.NUM_TOKENS:
                del self.running[key]
                ended.add(key)
            outputs.append([key, token_ids, FinishReason.LENGTH if key in ended else None])
        if outputs:
            self.outbox.append(Step(outputs, self._stats()))
        freed, self.ending = (self.ending, ended) if self._looks_ahead else (ended, self.ending)
        self.outbox += [Freed(key, self._stats()) for key in sorted(freed)]
        return True

    def _stats(self) -> Stats:
        return Stats(0, len(self.running), 0, len(self.running), 1000 - len(self.running), 0)
