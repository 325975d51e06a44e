"""Shows several answers while they grow: live panels on a terminal, a line a sentence elsewhere. Knows no Redis."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

COLOURS = ("cyan", "green", "yellow", "magenta")
#: A panel shows the end of its answer, so that four of them fit on a terminal of 24 lines.
SHOWN_LINES = 3


@dataclass
class Answer:
    """What is known of one request so far. Times are in milliseconds, None before they are known."""

    request_id: str
    question: str
    text: str = ""
    state: str = "waiting"
    tokens: int = 0
    queue_ms: float | None = None
    first_token_ms: float | None = None
    tokens_per_second: float | None = None


class QuietConsole(Console):
    """Goes on without a word when whoever read the output has seen enough."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen:
    """One terminal or pipe, and the answers that are shown on it."""

    def __init__(self, answers: Sequence[Answer], console: Console | None = None) -> None:
        self._answers = answers
        self._console = console or QuietConsole(highlight=False)
        self._live: Live | None = None
        self._printed = dict.fromkeys((answer.request_id for answer in answers), 0)

    @contextmanager
    def open(self) -> Iterator[Screen]:
        if not self._console.is_terminal:
            yield self
            return
        with Live(get_renderable=self._panels, console=self._console, refresh_per_second=12) as self._live:
            yield self

    def update(self, answer: Answer) -> None:
        """Call it after each change of an answer."""
        if self._live is None:
            self._print_whole_pieces(answer)

    def table(self) -> None:
        """The figures of all answers, at the end."""
        table = Table(box=box.SIMPLE_HEAD, title="What it took", title_justify="left")
        table.add_column("request")
        for name in ("queue wait", "first token", "tokens/s", "tokens"):
            table.add_column(name, justify="right")
        table.add_column("finish reason")
        for answer, colour in zip(self._answers, COLOURS, strict=True):
            figures = (_ms(answer.queue_ms), _ms(answer.first_token_ms), _number(answer.tokens_per_second))
            table.add_row(f"[{colour}]{answer.request_id}", *figures, str(answer.tokens), answer.state)
        self._console.print(table)

    def _panels(self) -> Group:
        return Group(
            *(self._panel(answer, colour) for answer, colour in zip(self._answers, COLOURS, strict=True)),
        )

    def _panel(self, answer: Answer, colour: str) -> Panel:
        lines = Text(answer.text.strip()).wrap(self._console, max(20, self._console.width - 4))[-SHOWN_LINES:]
        body = Text("\n").join(lines)
        subtitle = f"{answer.state}, {answer.tokens} tokens"
        title = f"{answer.request_id}: {escape(answer.question)}"
        return Panel(body, title=title, title_align="left", subtitle=subtitle, border_style=colour)

    def _print_whole_pieces(self, answer: Answer) -> None:
        """Prints what is new of an answer in pieces that read well in a file: up to a line's or a sentence's end."""
        new = answer.text[self._printed[answer.request_id] :]
        over = answer.state not in ("waiting", "running")
        ends = [match.end() for match in re.finditer(r"\n|(?<!\d)[.!?:](?=\s)", new)]
        length = len(new) if over else max(ends, default=0)
        self._printed[answer.request_id] += length
        for line in new[:length].splitlines():
            if line.strip():
                self._console.print(f"[bold]{answer.request_id}[/] | {escape(line.strip())}", soft_wrap=True)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
