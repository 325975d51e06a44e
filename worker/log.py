"""How the worker logs: structlog events, one a line, on stderr, with the request's id bound.

Events are verbs with fields. No prompt and no completion text ever gets here: exceptions are logged by their type and
place, never by their message, which may quote what a user wrote; and arq's own lines, which print arguments, are off.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog
from structlog.contextvars import merge_contextvars
from structlog.typing import FilteringBoundLogger, Processor

_FRAMES = 8


def setup(level: str, fmt: Literal["json", "console"], *, stream: TextIO | None = None) -> None:
    """Point structlog and the standard library's loggers at one stream (stderr) in one format."""
    shared: list[Processor] = [
        merge_contextvars,
        structlog.processors.add_log_level,
        _where_instead_of_what,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    stream = stream or sys.stderr
    console = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    renderer: Processor = structlog.processors.JSONRenderer() if fmt == "json" else console
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger("inferq").setLevel(level.upper())
    logging.getLogger("arq").setLevel(logging.CRITICAL)


def get_logger(role: str) -> FilteringBoundLogger:
    """A logger of one part of the worker."""
    logger: FilteringBoundLogger = structlog.get_logger(f"inferq.worker.{role}", role=role)
    return logger


def cause(exc: BaseException) -> dict[str, Any]:
    """What may be logged of an unexpected exception: its type, and where it was raised."""
    frames = traceback.extract_tb(exc.__traceback__)[-_FRAMES:]
    return {
        "error": type(exc).__name__,
        "raised_at": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
    }


def _where_instead_of_what(
    _logger: Any, _method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Replaces an exception of another library's log line by its type and place."""
    info = event_dict.pop("exc_info", None)
    exc = _exception(info)
    if exc is not None:
        event_dict.update(cause(exc))
    return event_dict


def _exception(
    info: bool | BaseException | tuple[type[BaseException] | None, BaseException | None, TracebackType | None] | None,
) -> BaseException | None:
    if isinstance(info, BaseException):
        return info
    if isinstance(info, tuple):
        return info[1]
    return sys.exc_info()[1] if info else None
