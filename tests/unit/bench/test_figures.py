"""What every benchmark shares: a percentile is one of the samples, and a budget that does not hold is said."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).parents[3] / "bench" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", _PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(figures: ModuleType, *flags: str) -> argparse.Namespace:
    parsed: argparse.Namespace = figures.arguments("").parse_args(list(flags))
    return parsed


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [([7.0], 99, 7.0), ([3.0, 1.0, 2.0], 50, 2.0), ([float(n) for n in range(1, 1001)], 99, 990.0)],
)
def test_a_percentile_is_the_nearest_rank(
    figures: ModuleType, samples: list[float], percent: float, expected: float
) -> None:
    assert figures.percentile(samples, percent) == expected


def test_a_budget_is_an_upper_bound_or_a_lower_one(figures: ModuleType) -> None:
    figure = figures.Figure
    assert figure("p99", 20.0, "ms", 20).holds
    assert not figure("p99", 20.1, "ms", 20).holds
    assert figure("ratio", 0.97, "", 0.97, at_least=True).holds
    assert not figure("ratio", 0.96, "", 0.97, at_least=True).holds
    assert figure("no budget", 1e9).holds
    table = figures.figures_table([figure("p99", 20.1, "ms", 20), figure("ratio", 0.9, "", 0.8, at_least=True)])
    over, under = table.splitlines()[-2:]
    assert over.split() == ["p99", "20.10", "ms", "20.00", "ms", "NO"]
    assert under.split() == ["ratio", "0.90", "at", "least", "0.80", "yes"]


def test_only_check_makes_a_budget_that_does_not_hold_an_error(
    figures: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [figures.Figure("p50", 1.0, "ms", 10), figures.Figure("p99", 50.0, "ms", 40)]
    figures.report(options(figures, "--json"), {"p99_ms": 50.0}, measured)
    said = json.loads(capsys.readouterr().out)
    assert said["p99_ms"] == 50.0
    assert said["over_budget"] == ["p99"]
    assert said["load_average"] >= 0
    figures.report(options(figures, "--check"), {}, measured[:1])
    with pytest.raises(SystemExit) as ended:
        figures.report(options(figures, "--check"), {}, measured)
    assert ended.value.code == figures.OVER_BUDGET
    assert "p99" in capsys.readouterr().err
