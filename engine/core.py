"""The step loop: take what the parent said, plan, run, book, report.

It knows the pipe's messages and the scheduler, and reaches the model through the Runner protocol alone. What is wrong
with one request is answered to that request; what goes wrong in a step is nobody's fault in particular, and ends the
loop with its exception.
"""

from __future__ import annotations

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


class Runner(Protocol):
    """A loaded model over its KV pool. `facts` name the pool's size and the limits of a step."""

    @property
    def facts(self) -> Ready: ...

    def step(self, scheduled: Seq[Scheduled]) -> list[int]:
        """Compute the step; one sampled token id for each of `scheduled` that `samples`, in order."""
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

    def step(self) -> list[Output]:
        """Plan, run and book one step."""
        scheduled = self.scheduler.schedule()
        sampled = self._runner.step(scheduled)
        self._num_steps += 1
        return self.scheduler.update(scheduled, sampled)

    def admit(self, message: Add) -> None:
        """Take a new request. Raises InvalidRequestError for one that cannot be served."""
        self.scheduler.add(sequence_from(message, self._facts))

    def _apply_inbox(self) -> bool:
        """Apply every message that has arrived; wait for one only where no step could run. False after Stop."""
        while True:
            try:
                message = self._inbox.get(block=not self.scheduler.has_work)
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
                self._send(Freed(key, self._stats()))
            case Pause(key):
                self.scheduler.pause(key)
                self._send(Paused(key))
            case Resume(key):
                self.scheduler.resume(key)
            case Ping():
                self._send(Pong())
            case PipeError():
                raise message
            case _:
                raise PipeError(f"not a message to the engine's process: {type(message).__name__}")

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
