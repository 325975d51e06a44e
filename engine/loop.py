"""The engine's loop: the child and the one task that reads it, from start to death.

When that task ends, for whatever reason, the loop is dead: `on_death` is told once, the child is gone, and nothing
starts again on what was left. Knows messages, but not what a request is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from .child import EngineProcess, describe_exit
from .child_log import write_line
from .config import EngineConfig
from .errors import EngineDeadError, EngineError, SettingError
from .pipe import Down, Fatal, Freed, Log, Paused, Ping, PipeError, Pong, Ready, Refused, Step
from .watchdog import Watchdog

#: How long a child that has closed its pipe may take to exit, and one that was asked to stop.
_EXIT_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0
_logger = logging.getLogger(__name__)

#: What the child says about requests.
RequestMessage = Step | Refused | Freed | Paused


class EngineLoop:
    """Starts once, dies once."""

    def __init__(
        self,
        on_message: Callable[[RequestMessage], None],
        on_death: Callable[[str], None],
        log: Callable[[Log], None],
        *,
        step_timeout_seconds: float | None = None,
        load_timeout_seconds: float | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._log = log
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._died = asyncio.Event()
        self._loaded = False
        self._fatal: Fatal | None = None
        self._step_timeout = step_timeout_seconds
        self._load_timeout = load_timeout_seconds
        self._watchdog: Watchdog | None = None
        self._watching: asyncio.Task[None] | None = None
        self._hung: str | None = None  #: what took too long
        self.death: str | None = None  #: why it is dead

    def check_alive(self) -> None:
        """Raises EngineDeadError."""
        if self.death is not None:
            raise EngineDeadError(self.death)

    async def start(self, command: Sequence[str], config: EngineConfig) -> Ready:
        """Start the child, and return what it says when its model is loaded.

        Raises EngineError where it was started before, SettingError if the child ends because of a setting,
        EngineDeadError if it is dead or dies on the way. Cancelled meanwhile, it leaves no child.
        """
        self.check_alive()
        if self._ready is not None:
            raise EngineError("the engine was started before")
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(command, config), name="inferq-engine-loop")
        # A task that is cancelled before its first step runs no line of its coroutine.
        self._task.add_done_callback(lambda _: self.die("the engine's loop was cancelled"))
        try:
            return await self._ready
        except BaseException:
            self.die("the start of the engine was cancelled")
            await self.stop()
            raise

    def send(self, message: Down) -> None:
        """To the child, without waiting; nothing happens where there is none. Raises as `EngineProcess.send` does."""
        if self._process is not None:
            self._process.send(message)

    def die(self, reason: str) -> None:
        """The first reason stands."""
        if self.death is not None:
            return
        self.death = reason
        if self._ready is not None and not self._ready.done():
            error: EngineError = EngineDeadError(reason)
            if self._fatal is not None and self._fatal.setting is not None:
                error = SettingError(self._fatal.setting, self._fatal.message)
            self._ready.set_exception(error)
        self._on_death(reason)
        self._died.set()

    async def wait_dead(self) -> str:
        """Return the reason, when there is one."""
        await self._died.wait()
        return self.death or ""

    async def stop(self) -> None:
        """Dead afterwards, and no child left. May be called again, and by several tasks at once."""
        self.die("the engine was stopped")
        if self._task is None:
            return
        if self._process is not None:
            # While it loads a model it hears nothing, and has nothing to end in good order.
            await self._process.terminate(grace_seconds=_STOP_SECONDS if self._loaded else 0.0)
        else:
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, command: Sequence[str], config: EngineConfig) -> None:
        reason = "the engine's loop was cancelled"
        try:
            self._process = await EngineProcess.start(command, config)
            self._watch("loading the model", self._load_timeout)
            reason = await self._read(self._process)
        except OSError as exc:
            reason = f"the engine's process could not be started: {exc}"
        except PipeError as exc:
            reason = f"the engine's process sent what is no message: {exc}"
        except Exception as exc:
            _logger.exception("the engine's loop failed")
            reason = f"the engine's loop failed: {exc!r}"
        finally:
            self._watch("nothing", None)
            self.die(reason)
            if self._process is not None:
                await self._process.end(grace_seconds=0)

    async def _read(self, process: EngineProcess) -> str:
        """Hand out messages until the pipe ends; returns why it did."""
        while (messages := await process.receive()) is not None:
            if self._watchdog is not None:
                self._watchdog.heard()
            for message in messages:
                self._handle(message)
            # Bytes that are there already are read without a wait: everybody else gets a turn in between.
            await asyncio.sleep(0)
        status = describe_exit(await process.end(grace_seconds=_EXIT_SECONDS))
        if self._hung is not None:
            return f"the engine's process was killed: {self._hung}"
        if self._fatal is not None:
            return f"the engine's process failed: {self._fatal.message}"
        return f"the engine's process {status}"

    def _handle(self, message: object) -> None:
        match message:
            case Step() | Refused() | Freed() | Paused():
                self._on_message(message)
            case Pong():
                pass  # heard
            case Log():
                write_line(self._log, message)
            case Fatal():
                self._fatal = message
            case Ready() if self._ready is not None and not self._loaded:
                self._loaded = True
                self._watch("a step", self._step_timeout)
                if not self._ready.done():  # as it is after a stop
                    self._ready.set_result(message)
            case _:
                raise PipeError(f"out of place: {message!r:.80}")

    def _watch(self, what: str, timeout_seconds: float | None) -> None:
        """From here on it is `what` that must not take longer than that without a word."""
        if self._watching is not None:
            self._watching.cancel()
        self._watchdog = self._watching = None
        if timeout_seconds is not None:
            self._watchdog = Watchdog(timeout_seconds, self._ask)
            limit = f"{what} took more than {timeout_seconds:g} s"
            self._watching = asyncio.create_task(self._kill_when_silent(self._watchdog, limit))

    def _ask(self) -> None:
        if self._loaded:  # before, it hears nothing
            self.send(Ping())

    async def _kill_when_silent(self, watchdog: Watchdog, limit: str) -> None:
        await watchdog.run()
        assert self._process is not None, "only a child that exists is watched"
        self._hung = limit
        self._process.kill()
