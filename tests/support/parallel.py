"""`pytest -n auto`, with pytest-xdist: how many processes run the suite, and which tests stay together in one of them.

Each process starts a server of its own: tests look at what belongs to a whole server and not to one database, such as
its channels, its statistics and its scripts. A server that was given is therefore for one process alone.
"""

from __future__ import annotations

import os
from typing import Any, Final

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

#: What a process takes with torch, a model, and the engines that its tests start.
BYTES_A_PROCESS: Final = 3 << 30
MAX_PROCESSES: Final = 16

#: Files that share something costly, such as workers with the real model.
TOGETHER: Final = ("tests/faults/",)
#: Files whose tests are long and share nothing: each test goes by itself.
APART: Final = ("tests/unit/cuda/", "tests/kernels/", "tests/model/", "tests/scripts/test_script_machine.py")
#: What takes longest begins first, so that no process is left alone with it at the end.
FIRST: Final = (
    "tests/unit/cuda/test_interpreted_kernels.py",
    "tests/faults/",
    "tests/integration/",
    "tests/parity/",
    "tests/examples/",
    "tests/security/",
    "tests/packaging/",
    "tests/test_sampling.py",
)


class Scheduling(LoadScopeScheduling):
    """Whole files go to whichever process is free, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """What one process gets as a whole: some files, a file or a test."""
    for prefix in TOGETHER:
        if nodeid.startswith(prefix):
            return prefix
    return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]


def rank(item: pytest.Item) -> int:
    """The lower, the earlier it begins."""
    return next((number for number, prefix in enumerate(FIRST) if item.nodeid.startswith(prefix)), len(FIRST))


def num_processes(num_cores: int, available_bytes: int) -> int:
    """Three for two cores, since tests wait for a third of their time, and no more than there is memory for."""
    return max(1, min(num_cores * 3 // 2, available_bytes // BYTES_A_PROCESS, MAX_PROCESSES))


def _server_is_given() -> bool:
    return bool(os.environ.get("INFERQ_TEST_REDIS_URL"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if _server_is_given():
        return 1
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    return num_processes(_num_cores(), psutil.virtual_memory().available)


def _num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """In the place of xdist's own default, which knows no files; any other that is named stays."""
    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Raises UsageError where several processes would share one server."""
    if _server_is_given() and (config.getoption("numprocesses", None) or 0) > 1:
        raise pytest.UsageError("the server that INFERQ_TEST_REDIS_URL names is for one process: -n 1, or no -n")
    if hasattr(config, "workerinput"):
        # The processes are as many as the cores: torch's own threads would only be in each other's way.
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=rank)
