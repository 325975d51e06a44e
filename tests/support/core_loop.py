"""The step loop over the oracle's cache, with a parent that speaks at set steps."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from inferq.engine.core import EngineCore
from inferq.engine.pipe import Add, Down, PipeError, Ready, Step, Stop, Up
from support.oracle import OracleRunner, facts

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Inbox(SimpleQueue):  # type: ignore[type-arg]
    """What arrives only when the core has nothing to run is in `when_idle`; after it comes Stop."""

    def __init__(self) -> None:
        self.when_idle: list[Down] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block and self.empty():
            return self.when_idle.pop(0) if self.when_idle else Stop()
        return super().get(block=block)


class Loop:
    """A core whose parent speaks at set steps: `script` maps a step's number to what arrives while it runs."""

    def __init__(self, limits: Ready, script: dict[int, list[Down | PipeError]], *, lookahead: int = 0) -> None:
        self.inbox = Inbox()
        self.sent: list[Up] = []
        self.used_blocks: list[int] = []
        self._script = dict(script)
        self.runner = OracleRunner(limits, before_step=self._arrive, lookahead=lookahead)
        self.core = EngineCore(self.runner, self.inbox, self.sent.append)

    def run(self, *first: Down | PipeError) -> None:
        for message in first:
            self.inbox.put(message)
        self.core.run()

    def _arrive(self, number: int) -> None:
        self.used_blocks.append(self.core.scheduler.pool.num_used)
        for message in self._script.pop(number, []):
            self.inbox.put(message)

    def tokens(self, key: int) -> list[int]:
        return [t for step in self.all(Step) for out in step.outputs if out[0] == key for t in out[1]]

    def all(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def add(key: int, prompt: list[int], max_tokens: int | None = None, **sampling: Any) -> Add:
    return Add(key, prompt, {**GREEDY, "max_tokens": max_tokens, **sampling})


def run(*messages: Down, script: dict[int, list[Down | PipeError]] | None = None, **limits: int) -> Loop:
    loop = Loop(facts(**limits), script or {})
    loop.run(*messages)
    return loop
