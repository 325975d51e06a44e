"""What every benchmark prints: its arguments, percentiles, the machine's description, tables, budgets, exit codes.

Standard library only: `gpu.py` runs where neither this package nor what it depends on is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

#: The exit code of a benchmark that could not measure: no figure is printed that was not measured.
CANNOT_MEASURE = 3
#: The exit code with `--check` where a budget does not hold.
OVER_BUDGET = 1
#: What else the machine had to do when the benchmark began.
LOAD_AVERAGE = os.getloadavg()[0]


def cannot_measure(reason: str) -> NoReturn:
    print(f"cannot measure: {reason}", file=sys.stderr)
    raise SystemExit(CANNOT_MEASURE)


def arguments(
    description: str,
    *,
    quick: str = "end within 45 s on two cores, with fewer samples",
    needs_quiet: bool = True,
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if needs_quiet:
        parser.add_argument("--busy", action="store_true", help="measure even if the machine is not quiet")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget does not hold")
    return parser


def require_quiet(args: argparse.Namespace) -> None:
    """End with CANNOT_MEASURE where others use the machine: threads that are preempted make figures meaningless."""
    cores = os.cpu_count() or 1
    if LOAD_AVERAGE > cores / 2 and not args.busy:
        busy = f"load average {LOAD_AVERAGE:.2f} on {cores} cores"
        cannot_measure(f"the machine is not quiet: {busy} (--busy measures anyway)")


def machine() -> str:
    """One line that names the machine and its load, since figures of a shared machine mean little without it."""
    python = platform.python_version()
    return f"{processor()}, {os.cpu_count()} cores, Python {python}, load average {LOAD_AVERAGE:.2f}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of at least one sample."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent * 10) // 1000) - 1))]


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


class Figure(NamedTuple):
    """A line of the table: what was measured, and the budget that it has, if any."""

    what: str
    measured: float
    unit: str = ""
    budget: float | None = None
    at_least: bool = False  #: the budget is a lower bound
    digits: int = 2

    @property
    def holds(self) -> bool:
        if self.budget is None:
            return True
        return self.measured >= self.budget if self.at_least else self.measured <= self.budget

    def cells(self) -> tuple[str, str, str, str]:
        if self.budget is None:
            return self.what, self._text(self.measured), "", ""
        bound = f"{'at least ' if self.at_least else ''}{self._text(self.budget)}"
        return self.what, self._text(self.measured), bound, "yes" if self.holds else "NO"

    def _text(self, value: float) -> str:
        return f"{value:.{self.digits}f} {self.unit}".rstrip()


def figures_table(figures: Sequence[Figure]) -> str:
    return table(("figure", "measured", "budget", "holds"), [figure.cells() for figure in figures])


def report(args: argparse.Namespace, keys: Mapping[str, Any], figures: Sequence[Figure] = ()) -> None:
    """The last line with `--json`, and with `--check` the end of a benchmark whose figures are over their budgets."""
    over = [figure.what for figure in figures if not figure.holds]
    if args.json:
        print(json.dumps({**keys, "over_budget": over, "load_average": round(LOAD_AVERAGE, 2)}))
    if args.check and over:
        print(f"over budget: {'; '.join(over)}", file=sys.stderr)
        raise SystemExit(OVER_BUDGET)
