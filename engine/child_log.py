"""Where the log lines of the engine and its child go: the user's function, or the standard library's logging."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .pipe import Log

_logger = logging.getLogger("inferq.engine")


def log_line(line: Log) -> None:
    """The default."""
    level = logging.getLevelNamesMapping().get(line.level.upper(), logging.INFO)
    _logger.log(level, "%s %s", line.event, line.details)


def write_line(log: Callable[[Log], None], line: Log) -> None:
    """What goes wrong in a user's function is no reason to end every request."""
    try:
        log(line)
    except Exception:
        _logger.exception("a log line of the engine could not be written")
