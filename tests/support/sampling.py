"""Small and full runs of the suite: which slow tests run, how many examples Hypothesis tries, what is skipped.

`pytest` runs a seeded sample of the tests marked `slow`; `pytest --full` runs all of them, and Hypothesis tries more.
The seed is the day's date, so that a week of runs sees different samples; `--sample-seed` repeats one. `--one-in=N`
runs another N-th of them each day, so that N days see all; with `--full` too, what it runs is at full size.
`slow(family=..., share=...)` puts tests of several files into one family, of which a small run picks another share, or
none.
"""

from __future__ import annotations

import datetime
import importlib.util
import random
from collections import defaultdict
from typing import Any

import hypothesis
import pytest

#: The share of each family of slow tests that a small run picks, at least one of each.
SHARE = 0.2

_QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("small", max_examples=30, deadline=None, suppress_health_check=_QUIET)
hypothesis.settings.register_profile("full", max_examples=400, deadline=None, suppress_health_check=_QUIET)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("inferq")
    group.addoption("--full", action="store_true", help="run every slow test, not a sample, and more examples")
    group.addoption("--one-in", type=int, metavar="N", help="run one in N of the slow tests: others each day")
    group.addoption("--sample-seed", type=int, default=None, help="the seed of the sample (default: today's date)")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "small")
    if config.option.sample_seed is None:
        today = int(datetime.date.today().strftime("%Y%m%d"))
        config.option.sample_seed = getattr(config, "workerinput", {}).get("sample_seed", today)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of one run take one sample, also where the day ends while they start."""
    node.workerinput["sample_seed"] = sample_seed(node.config)


def sample_seed(config: pytest.Config) -> int:
    seed: int = config.getoption("--sample-seed")
    return seed


def pytest_report_header(config: pytest.Config) -> str:
    return _what_runs(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Once more at the end, since a quiet run shows no header."""
    terminalreporter.write_line(_what_runs(config))


def _what_runs(config: pytest.Config) -> str:
    if (one_in := config.getoption("--one-in")) is not None:
        return f"slow suites: one in {one_in}, --sample-seed={sample_seed(config)} (all of them: --full alone)"
    if config.getoption("--full"):
        return "slow suites: all of them, at full size"
    return f"slow suites: a sample, --sample-seed={sample_seed(config)} (all of them: --full)"


def left_out(items: list[pytest.Item], seed: int, one_in: int | None = None) -> set[pytest.Item]:
    """The slow tests that a small run with this seed leaves out, or a run of that day's part.

    A family is what the mark names, else the slow tests of one folder.
    """
    families: dict[tuple[str, float], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("slow")) is not None:
            of_folder = (item.path.parent.name, SHARE)
            families[(mark.kwargs["family"], mark.kwargs["share"]) if mark.kwargs else of_folder].append(item)
    out: set[pytest.Item] = set()
    for (name, share), family in families.items():
        family.sort(key=lambda item: item.nodeid)
        if one_in is not None:
            out.update(item for number, item in enumerate(family) if number % one_in != _day(seed) % one_in)
            continue
        keep = max(1, round(len(family) * share)) if share else 0
        out.update(random.Random(f"{seed} {name}").sample(family, len(family) - keep))
    return out


def _day(seed: int) -> int:
    """Days count on from one to the next; any other seed counts as itself."""
    try:
        return datetime.datetime.strptime(str(seed), "%Y%m%d").toordinal()
    except ValueError:
        return seed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpu(items)
    named = any("::" in argument for argument in config.args)
    one_in = config.getoption("--one-in")
    if named or (config.getoption("--full") and one_in is None):
        return
    out = left_out(items, sample_seed(config), one_in)
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if gpu_items else None
    for item in gpu_items:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"
