"""The engine's child over all its lives: started, watched, started again when it dies, given up when that is no use.

Each life is an EngineLoop of its own, and in between there is no child. Whoever owns the requests is told when one has
died and when the next one is ready. Knows messages, but not what a request is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from .child_log import write_line
from .config import EngineConfig
from .errors import EngineDeadError, SettingError
from .loop import EngineLoop, RequestMessage
from .pipe import Down, Log, Ready, Step
from .restart import RestartBudget, RestartPolicy

#: So many times as long as the first, another child may take to load.
_LOAD_PATIENCE: Final = 10
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who is told. None of these may block; all but `log` must not raise."""

    on_message: Callable[[RequestMessage], None]
    on_ready: Callable[[], None]  #: a child is there, and has no request
    on_crash: Callable[[str], None]  #: it is gone; there will be another
    on_death: Callable[[str], None]  #: it is gone; there will be none
    log: Callable[[Log], None]


class Supervisor:
    """Starts once, and dies once for good. Without a policy the first death is that one."""

    def __init__(
        self, command: Sequence[str], config: EngineConfig, owner: Owner, policy: RestartPolicy | None = None
    ) -> None:
        self._command = tuple(command)
        self._config = config
        self._owner = owner
        self._policy = policy
        self._budget = RestartBudget(policy) if policy is not None else None
        self._facts: Ready | None = None
        self._load_seconds = 0.0  #: how long the first child took
        self._fruitful = False
        self._loop = self._new_loop()
        self._task: asyncio.Task[None] | None = None
        self._died = asyncio.Event()
        self.death: str | None = None  #: why it is dead for good
        self.num_restarts = 0  #: how many children came after the first

    def check_alive(self) -> None:
        """Raises EngineDeadError if it is dead for good."""
        if self.death is not None:
            raise EngineDeadError(self.death)

    async def start(self) -> Ready:
        """Start the first child, and return what it says when its model is loaded. That it comes up is not retried.

        Raises EngineError where it was started before, SettingError if the child ends because of a setting,
        EngineDeadError if it is dead or dies on the way. Cancelled meanwhile, it leaves no child.
        """
        self.check_alive()
        started_at = time.monotonic()
        facts = await self._loop.start(self._command, self._config)
        self.check_alive()  # it may have died since it said that it is ready
        self._facts = facts
        self._load_seconds = time.monotonic() - started_at
        # The next child gets as large a pool as this one: what was admitted must fit there too. And the same attention,
        # which has blocks of its own size and might be measured otherwise the next time.
        self._config = replace(self._config, num_blocks=facts.num_blocks, attention=facts.attention)
        self._owner.on_ready()
        if self._budget is not None:
            self._task = asyncio.create_task(self._supervise(self._budget), name="inferq-engine-supervisor")
            # A task that is cancelled before its first step runs no line of its coroutine.
            self._task.add_done_callback(lambda _: self.die("the engine's supervisor was cancelled"))
        return facts

    def send(self, message: Down) -> None:
        """To the child, without waiting; nothing happens where there is none."""
        self._loop.send(message)

    def die(self, reason: str) -> None:
        """For good. The first reason stands."""
        if self.death is None:
            self.death = reason
            self._loop.die(reason)
            self._owner.on_death(reason)
            self._died.set()

    async def wait_dead(self) -> str:
        """Return the reason, when there is one."""
        await self._died.wait()
        return self.death or ""

    async def stop(self, reason: str = "the engine was stopped") -> None:
        """Dead for good afterwards, and no child left. May be called again, and by several tasks at once."""
        self.die(reason)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._loop.stop()

    def _new_loop(self) -> EngineLoop:
        step_timeout = None if self._policy is None else self._policy.step_timeout_seconds
        # How long loading may take nobody knows before it was seen once.
        load_timeout = step_timeout + _LOAD_PATIENCE * self._load_seconds if step_timeout and self._facts else None
        return EngineLoop(
            self._on_message,
            self._on_loop_death,
            self._owner.log,
            step_timeout_seconds=step_timeout,
            load_timeout_seconds=load_timeout,
        )

    def _on_message(self, message: RequestMessage) -> None:
        self._fruitful = self._fruitful or isinstance(message, Step)
        self._owner.on_message(message)

    def _on_loop_death(self, reason: str) -> None:
        if self.death is not None:
            return
        if self._facts is None or self._budget is None:
            self.die(reason)
        else:
            self._owner.on_crash(reason)

    async def _supervise(self, budget: RestartBudget) -> None:
        reason = "the engine's supervisor was cancelled"
        try:
            reason = await self._restart_while_it_helps(budget)
        except Exception as exc:
            _logger.exception("the engine's supervisor failed")
            reason = f"the engine's supervisor failed: {exc!r}"
        finally:
            self.die(reason)

    async def _restart_while_it_helps(self, budget: RestartBudget) -> str:
        """Start a child for each that dies; returns why no further one is started."""
        while True:
            reason = await self._loop.wait_dead()
            await self._loop.stop()  # what the old child held, memory above all, is there for the next
            delay = budget.after_death(fruitful=self._fruitful)
            if delay is None:
                return f"{reason}; starting it again, {self.num_restarts} times so far, does not help"
            self._report(reason, delay)
            await asyncio.sleep(delay)
            self._fruitful = False
            self.num_restarts += 1
            self._loop = self._new_loop()
            with suppress(EngineDeadError, SettingError):
                facts = await self._loop.start(self._command, self._config)
                if facts != self._facts:
                    await self._loop.stop()
                    return f"the engine's process came back with another model: {facts}"
                self._loop.check_alive()  # it may have died since it said that it is ready
                self._owner.on_ready()

    def _report(self, reason: str, delay: float) -> None:
        details = {"reason": reason, "restart_in_seconds": delay, "restarts_before": self.num_restarts}
        write_line(self._owner.log, Log("warning", "engine_died", details))
