"""How the GPU benchmark measures on a card: played by numbers here, where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))

import torch
from gpu_parts import card as gpu_card


class FakeCuda:
    """What of torch.cuda a Card asks for; an event says the milliseconds since the one before."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, end: FakeCuda.Event) -> float:
            return 2.0

    @staticmethod
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name="A card", major=9, minor=0, multi_processor_count=132, total_memory=2**37, L2_cache_size=60 * 2**20
        )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu_card.Card]:
    for name, value in {
        "Event": FakeCuda.Event,
        "get_device_properties": FakeCuda.properties,
        "current_device": lambda: 0,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (2**20, 2**37),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield gpu_card.Card()


def test_a_card_says_what_it_is(card: gpu_card.Card) -> None:
    assert card.describe() == "A card, sm_90, 132 SMs, 128 GiB, L2 60 MiB"
    assert (card.multiprocessors, card.l2_bytes) == (132, 60 * 2**20)
    assert card.free_bytes() == 2**20


def test_a_card_times_by_events_and_counts_what_is_read_and_written(
    card: gpu_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    timing = card.time(lambda: calls.append(1), 5)
    assert (timing.median, len(calls)) == (0.002, 6)
    assert timing.per(2).median == 0.001
    card.device = torch.device("cpu")
    monkeypatch.setattr(gpu_card, "COPY_BYTES", 2**12)
    monkeypatch.setattr(gpu_card, "MATRIX", 8)
    bandwidth, _ = card.copy_bandwidth()
    assert bandwidth == 2 * 2**12 / 0.002
    assert card.matrix_rate(torch.float32) == 2 * 8**3 / 0.002


def test_the_times_of_kernels_are_added_up(card: gpu_card.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[SimpleNamespace] = []

    @contextmanager
    def profile(activities: list[Any]) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(key_averages=lambda: events)

    monkeypatch.setattr(gpu_card, "profile", profile)
    runs: list[int] = []
    assert card.kernel_seconds(lambda: runs.append(1)) is None  # the profiler saw no device
    assert len(runs) == 2
    events += [SimpleNamespace(self_device_time_total=microseconds) for microseconds in (1500.0, 0.0, 500.0)]
    assert card.kernel_seconds(lambda: None) == 0.002
