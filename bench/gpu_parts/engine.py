"""The engine on a random model, in this process: its runner, its graphs kept for inspection, its step loop.

No pipe, no text, no Redis: `EngineCore` gets its messages from a queue that is filled beforehand, and the time of each
step's answer is noted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch

from inferq.engine.assembly import assemble
from inferq.engine.attention.backends import choose_backends
from inferq.engine.attention.choice import Choice, Workload
from inferq.engine.config import EngineConfig
from inferq.engine.core import EngineCore
from inferq.engine.decode_graphs import Capture
from inferq.engine.kernels import load_kernels
from inferq.engine.pipe import Add, Down, PipeError, Refused, Step, Stop, Up
from inferq.engine.runner import ModelRunner
from inferq.engine.sequence import Scheduled, SequenceSampling
from inferq.engine.sequence import Sequence as EngineSequence

from .broken import device_is_broken
from .card import Card
from .model import NAME, loaded, random_prompts
from .shapes import ModelShape

#: Tokens a step at most: prompts are computed in chunks of that many.
STEP_TOKENS: Final = 8192
#: The requests before those that are timed: how many, of how many tokens, for how many new ones.
_FIRST_REQUESTS: Final = 3
_FIRST_TOKENS: Final = 32
_FIRST_NEW_TOKENS: Final = 2


class GenerationError(Exception):
    """The engine did not generate what it was asked for."""


class Recorded(NamedTuple):
    """A decode step: as a function, as a graph, and the logits [1, rows, vocabulary] that the graph leaves."""

    run: Callable[[], None]
    replay: Callable[[], None]
    logits: torch.Tensor


class KeptGraphs:
    """Records as `recorder` does, and keeps the graph whose logits have so many rows."""

    def __init__(self, recorder: Capture, model: Any, rows: int) -> None:
        self.recorder = recorder
        self._rows = rows
        self._logits = torch.empty(0)
        self.kept: Recorded | None = None
        model.register_forward_hook(self._see)

    def _see(self, module: object, arguments: object, output: Any) -> None:
        self._logits = output.logits

    @property
    def last_logits(self) -> torch.Tensor:
        """Of the forward pass that ran, or was recorded, last."""
        return self._logits

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = self.recorder(run)
        if self._logits.shape[-2:-1] == (self._rows,):
            self.kept = Recorded(run, replay, self._logits)
        self._logits = torch.empty(0)  # of the others, graphs may use the memory again
        return replay


def make_runner(
    model: Any, shape: ModelShape, *, max_context: int, max_seqs: int, capture: KeptGraphs, attention: str = "triton"
) -> ModelRunner:
    """One that has answered a few requests: what is timed is not the first of its kind.

    Says on the way what `auto` would choose, and what the engine logs. Raises ModelLoadError.
    """
    config = EngineConfig(
        model=NAME,
        max_model_len=max_context,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        attention=attention,
    )
    runner = assemble(
        loaded(model, shape, max_context=max_context),
        config,
        _log,
        choose=partial(_choose, attention, capture.recorder),
        kernels=load_kernels(),
        capture=capture,
    )
    short = min(_FIRST_TOKENS, max_context - _FIRST_NEW_TOKENS)
    generate(runner, random_prompts(_FIRST_REQUESTS, short, shape.vocabulary, seed=0), _FIRST_NEW_TOKENS)
    return runner


def _choose(attention: str, recorder: Capture, workload: Workload) -> list[Choice]:
    try:
        auto = choose_backends("auto", recorder, workload)
        print(f"  auto would try {', '.join(each.backend.name for each in auto)}: {auto[0].reason}", flush=True)
    except Exception as exc:  # it is looked at only
        if device_is_broken(exc):
            raise
        print(f"  auto cannot choose: {exc!r}", flush=True)
    return choose_backends(attention, recorder, workload)


def _log(level: str, event: str, **details: Any) -> None:
    facts = ", ".join(
        f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in details.items()
    )
    print(f"  {event}: {facts}", flush=True)


class Answer(NamedTuple):
    """A step's tokens, and when they were here (seconds, of the monotonic clock)."""

    at: float
    keys: tuple[int, ...]


class Generated(NamedTuple):
    """A whole run: `seconds` from the first request to the last token."""

    prompt_tokens: int
    new_tokens: int  #: of each request
    begin: float
    answers: list[Answer]
    tokens: dict[int, list[int]]

    @property
    def seconds(self) -> float:
        return self.answers[-1].at - self.begin

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def first_token_seconds(self) -> float:
        """Until each request had its first token."""
        waiting = set(self.tokens)
        for answer in self.answers:
            waiting.difference_update(answer.keys)
            if not waiting:
                return answer.at - self.begin
        raise GenerationError("a request has no token")

    def decode_steps(self) -> list[tuple[float, list[int]]]:
        """Seconds and contexts of the steps that decoded a token for every request, which each had one before."""
        steps, done = [], dict.fromkeys(self.tokens, 0)
        before: Answer | None = None
        for answer in self.answers:
            # A step that computes output number n of a request reads its prompt and the n - 1 tokens before.
            contexts = [self.prompt_tokens + done[key] for key in answer.keys]
            if before is not None and len(answer.keys) == len(done) and min(done.values()) > 0:
                steps.append((answer.at - before.at, contexts))
            for key in answer.keys:
                done[key] += 1
            before = answer
        return steps


def generate(runner: ModelRunner, prompts: Sequence[list[int]], new_tokens: int) -> Generated:
    """Greedily, `new_tokens` for each prompt; all of them are there from the start. Raises GenerationError."""
    inbox: SimpleQueue[Down | PipeError] = SimpleQueue()
    sampling = {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    for key, prompt in enumerate(prompts):
        inbox.put(Add(key, list(prompt), dict(sampling)))
    tokens: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    answers: list[Answer] = []
    unfinished = set(tokens)

    def send(message: Up) -> None:
        if isinstance(message, Refused):
            raise GenerationError(message.message)
        if not isinstance(message, Step):
            return
        answers.append(Answer(time.monotonic(), tuple(key for key, _, _ in message.outputs)))
        for key, ids, finish_reason in message.outputs:
            tokens[key] += ids
            if finish_reason is not None:
                unfinished.discard(key)
        if not unfinished:
            inbox.put(Stop())

    begin = time.monotonic()
    EngineCore(runner, inbox, send).run()
    short = [key for key, ids in tokens.items() if len(ids) != new_tokens]
    if short:
        raise GenerationError(f"{len(short)} of {len(prompts)} requests did not get their {new_tokens} tokens")
    return Generated(len(prompts[0]), new_tokens, begin, answers, tokens)


def launch_decode(runner: ModelRunner, *, rows: int, context: int) -> list[int]:
    """A step of `rows` sequences over what lies in the cache, `context` tokens each; the runner's arrays stay so.

    Raises ValueError where the cache has too few blocks for them: the kernels would write behind its end.
    """
    if not fits(runner, rows=rows, context=context):
        raise ValueError(f"{runner.facts.num_blocks} blocks do not hold {rows} sequences of {context} tokens")
    count = -(-context // runner.facts.block_size)
    scheduled = []
    for row in range(rows):
        table = list(range(row * count, (row + 1) * count))
        sequence = EngineSequence(
            row,
            [row % runner.facts.vocab_size] * context,
            context,
            SequenceSampling(max_tokens=1, temperature=0.0),
            num_computed_tokens=context - 1,
            block_table=table,
        )
        scheduled.append(Scheduled(sequence, 1))
    return runner.launch(scheduled).tokens()


def fits(runner: ModelRunner, *, rows: int, context: int) -> bool:
    """Whether the cache holds so many sequences of that length at once."""
    return rows * -(-context // runner.facts.block_size) <= runner.facts.num_blocks


def free(card: Card) -> None:
    """Gives back what a model, a runner and its graphs held, once nobody refers to them."""
    gc.collect()
    card.free_bytes()
