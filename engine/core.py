"""The step loop: take what the parent said, plan, launch, book, report.

Where the runner allows it, a step is planned and launched while the one before it is still computed, so that a device
does not wait for its host. What the parent says then meets a step on its way: it is applied at once to what is planned
next, and acknowledged when no step on its way was planned without it. So is the end of a request: the parent hears of
it with the last token, and once more when no step on its way has the request in it.

It knows the pipe's messages and the scheduler, and reaches the model through the Runner protocol alone. What is wrong
with one request is answered to that request; what goes wrong in a step is nobody's fault in particular, and ends the
loop with its exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from .blocks import BlockPool
from .errors import InvalidRequestError
from .pipe import (
    Abort,
    Add,
    Down,
    Freed,
    Pause,
    Paused,
    Ping,
    PipeError,
    Pong,
    Ready,
    Refused,
    Resume,
    Stats,
    Step,
    Stop,
    Up,
)
from .request import SamplingParams
from .scheduler import Output, Scheduler
from .sequence import Scheduled, Sequence, SequenceSampling

_INTEGERS: Final = ("max_tokens", "top_k", "seed")


class Launched(Protocol):
    """A step on its way."""

    def tokens(self) -> list[int]:
        """Wait for it; one sampled token id for each of the scheduled that `samples`, in order. Called once."""
        ...


class Runner(Protocol):
    """A loaded model over its KV pool. `facts` name the pool's size and the limits of a step."""

    @property
    def facts(self) -> Ready: ...

    @property
    def lookahead(self) -> int:
        """Steps that may be launched before the tokens of the step ahead of them are known: 0 or 1."""
        ...

    def launch(self, scheduled: Seq[Scheduled]) -> Launched:
        """Begin to compute a step. Steps run, and their tokens are asked for, in the order in which they are launched.

        A sequence whose last token is pending was sampled for in the step launched before this one.
        """
        ...


class EngineCore:
    """One model, its sequences, and the loop that steps them.

    `inbox` holds the parent's messages as they arrived, or the PipeError that ended their reading. `send` must not
    block.
    """

    def __init__(self, runner: Runner, inbox: SimpleQueue[Down | PipeError], send: Callable[[Up], None]) -> None:
        self._runner = runner
        self._inbox = inbox
        self._send = send
        self._num_steps = 0
        self._in_flight: deque[tuple[list[Scheduled], Launched]] = deque()
        #: What is to be said of which request, with the number of steps that must be booked before.
        self._acknowledgements: deque[tuple[int, type[Freed] | type[Paused], int]] = deque()
        self._facts = runner.facts
        self.scheduler = Scheduler(
            BlockPool(self._facts.num_blocks, self._facts.block_size),
            max_num_seqs=self._facts.max_num_seqs,
            max_num_batched_tokens=self._facts.max_num_batched_tokens,
        )

    def run(self) -> None:
        """Step until Stop. Raises what a step raised, and PipeError for what is no message to a child."""
        while self._apply_inbox():
            if outputs := self.step():
                self._send(Step([[*output] for output in outputs], self._stats()))
                for output in outputs:
                    if output.finish_reason is not None:
                        self._acknowledge_later(Freed, output.key)
            self._acknowledge()

    def step(self) -> list[Output]:
        """Launch a step, and book as many as the runner's lookahead leaves; what was booked."""
        outputs: list[Output] = []
        while (scheduled := self.scheduler.schedule()) is None:
            outputs += self._book()
        if scheduled:
            self._in_flight.append((scheduled, self._runner.launch(scheduled)))
        # Where nothing could be planned, what is on its way is all that can change that.
        ahead = self._runner.lookahead if scheduled else 0
        while len(self._in_flight) > ahead:
            outputs += self._book()
        return outputs

    def _book(self) -> list[Output]:
        scheduled, launched = self._in_flight.popleft()
        sampled = launched.tokens()
        self._num_steps += 1
        return self.scheduler.update(scheduled, sampled)

    def admit(self, message: Add) -> None:
        """Take a new request. Raises InvalidRequestError for one that cannot be served."""
        self.scheduler.add(sequence_from(message, self._facts))

    def _apply_inbox(self) -> bool:
        """Apply every message that has arrived; wait for one only where no step could run. False after Stop."""
        while True:
            try:
                message = self._inbox.get(block=not (self.scheduler.has_work or self._in_flight))
            except Empty:
                return True
            if isinstance(message, Stop):
                return False
            self._apply(message)

    def _apply(self, message: Down | PipeError) -> None:
        match message:
            case Add(key):
                try:
                    self.admit(message)
                except InvalidRequestError as exc:
                    self._send(Refused(key, str(exc), invalid=True))
            case Abort(key):
                self.scheduler.abort(key)
                self._acknowledge_later(Freed, key)
            case Pause(key):
                self.scheduler.pause(key)
                self._acknowledge_later(Paused, key)
            case Resume(key):
                self.scheduler.resume(key)
            case Ping():
                self._send(Pong())
            case PipeError():
                raise message
            case _:
                raise PipeError(f"not a message to the engine's process: {type(message).__name__}")

    def _acknowledge_later(self, answer: type[Freed] | type[Paused], key: int) -> None:
        """When the steps that are on their way now are booked: at once where there are none."""
        self._acknowledgements.append((self._num_steps + len(self._in_flight), answer, key))
        self._acknowledge()

    def _acknowledge(self) -> None:
        while self._acknowledgements and self._acknowledgements[0][0] <= self._num_steps:
            _, answer, key = self._acknowledgements.popleft()
            self._send(Freed(key, self._stats()) if answer is Freed else Paused(key))

    def _stats(self) -> Stats:
        return Stats(
            step=self._num_steps,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            used_blocks=self.scheduler.pool.num_used,
            free_blocks=self.scheduler.pool.num_free,
            preemptions=self.scheduler.num_preemptions,
        )


def sequence_from(message: Add, facts: Ready) -> Sequence:
    """The sequence that a message asks for. Raises InvalidRequestError for whatever of it cannot be served."""
    prompt, generated = message.prompt_token_ids, message.generated_token_ids
    _check_prompt(prompt, facts)
    _check_ids("generated_token_ids", generated, facts)
    params = _sampling_params(message)
    max_tokens = facts.output_limit(len(prompt), params.max_tokens)
    if len(generated) >= max_tokens:
        raise InvalidRequestError(f"{len(generated)} tokens were generated already, of {max_tokens} at most")
    sampling = SequenceSampling(
        max_tokens=max_tokens,
        temperature=params.temperature,
        # A top_k that excludes nothing is off: no runner has to carry a number of any size.
        top_k=params.top_k if params.top_k < facts.vocab_size else 0,
        top_p=params.top_p,
        seed=params.seed,
        stop_token_ids=facts.stop_ids(params.stop_token_ids, ignore_eos=params.ignore_eos),
    )
    return Sequence(message.key, prompt + generated, len(prompt), sampling)


def _check_prompt(prompt: list[int], facts: Ready) -> None:
    _check_ids("prompt_token_ids", prompt, facts)
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    if len(prompt) >= facts.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens; with max_model_len {facts.max_model_len} "
            f"it may have {facts.max_model_len - 1} at most"
        )


def _check_ids(name: str, token_ids: list[int], facts: Ready) -> None:
    if not isinstance(token_ids, list) or not set(map(type, token_ids)) <= {int}:
        raise InvalidRequestError(f"{name} must be a list of integers")
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < facts.vocab_size:
            raise InvalidRequestError(f"token id {token_id} is not in the vocabulary of {facts.vocab_size} tokens")


def _sampling_params(message: Add) -> SamplingParams:
    try:
        params = SamplingParams(**message.sampling)
        params = replace(params, stop_token_ids=tuple(params.stop_token_ids))
    except (TypeError, OverflowError) as exc:
        raise InvalidRequestError(f"sampling: {exc}") from exc
    for name in _INTEGERS:
        if type(value := getattr(params, name)) is not int and value is not None:
            raise InvalidRequestError(f"sampling: {name} must be an integer, not {value!r}")
    if not set(map(type, params.stop_token_ids)) <= {int}:
        raise InvalidRequestError("sampling: stop_token_ids must be integers")
    return params
