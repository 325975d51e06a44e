"""What the commands of `inferq` share: answers and JSON go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

from .events import NoWorker

_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "ignore_eos")


class OutputLost(Exception):
    """Whoever read our output has gone, or it cannot be written for another reason."""


@dataclass(slots=True)
class _Line:
    """The last line of stdout."""

    is_open: bool = False  #: text without the newline that ends it


_line = _Line()


def sampling_of(args: Namespace) -> dict[str, Any]:
    """The sampling flags that were given."""
    return {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}


def no_worker(notice: NoWorker) -> str:
    return f"no worker serves {notice.model} now; the request waits for one"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def print_value(value: dict[str, Any], *, as_json: bool, text: str) -> None:
    write((dumps(value) if as_json else text) + "\n")


def dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def write(text: str) -> None:
    """Raises OutputLost."""
    if sys.stdout is None:  # closed before we started
        raise OutputLost("standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as exc:
        raise OutputLost(f"standard output: {exc.strerror}") from exc
    if text:
        _line.is_open = not text.endswith("\n")


def say(text: str) -> None:
    """A line on stderr; where a terminal shows both, it does not go on in the line of an answer.

    That nobody reads it changes nothing of what is done.
    """
    begin = "\n" if _line.is_open and _is_terminal() else ""
    try:
        sys.stderr.write(f"{begin}inferq: {text}\n")
    except OSError:
        lose(sys.stderr)
    else:
        _line.is_open = _line.is_open and not begin


def lose(stream: TextIO) -> None:
    """What the stream still holds goes nowhere, or the interpreter fails to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and sys.stderr.isatty()
