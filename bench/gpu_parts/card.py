"""The CUDA device under measurement: timing by events, graph capture, kernel times by the profiler.

Everything that needs a device is in here; the parts of the benchmark reach it through one object, so that the tests
run them with a stand-in on the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from inferq.cuda.graph import GraphRecorder
from inferq.engine.decode_graphs import Capture

#: Of a copy: so far more than an L2 holds that its share does not matter.
COPY_BYTES: Final = 4 * 2**30
#: The side of the square matrix product that measures the arithmetic rate.
MATRIX: Final = 8192


class Timing(NamedTuple):
    """Seconds a call: the median of several runs, and the fastest and the slowest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        return cls(statistics.median(samples), min(samples), max(samples))

    def per(self, calls: int) -> Timing:
        """Of one call, where `calls` of them were timed together."""
        return Timing(self.median / calls, self.low / calls, self.high / calls)

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median


class Card:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._properties = torch.cuda.get_device_properties(self.device)

    @property
    def multiprocessors(self) -> int:
        return int(self._properties.multi_processor_count)

    @property
    def l2_bytes(self) -> int:
        return int(self._properties.L2_cache_size)

    def describe(self) -> str:
        p = self._properties
        memory, l2 = p.total_memory / 2**30, self.l2_bytes / 2**20
        return f"{p.name}, sm_{p.major}{p.minor}, {self.multiprocessors} SMs, {memory:.0f} GiB, L2 {l2:.0f} MiB"

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def time(self, run: Callable[[], object], repeats: int) -> Timing:
        """`run`, which only enqueues, once to warm up and then `repeats` times, each between two events."""
        run()
        self.synchronize()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        self.synchronize()
        return Timing.of([begin.elapsed_time(end) / 1000 for begin, end in events])

    def recorder(self) -> Capture:
        """What records a function as a graph, as the engine does."""
        return GraphRecorder(self.device)

    def kernel_seconds(self, run: Callable[[], object]) -> float | None:
        """The sum of the times of the kernels (and copies) that `run` enqueues; None where the profiler sees none."""
        microseconds = 0.0
        for _ in range(2):  # the first one sets the profiler up
            self.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run()
                self.synchronize()
            microseconds = sum(event.self_device_time_total for event in profiler.key_averages())
        return microseconds / 1e6 if microseconds > 0 else None

    def copy_bandwidth(self) -> tuple[float, Timing]:
        """Bytes a second of a large copy on the device, read and written ones counted."""
        size = min(COPY_BYTES, self.free_bytes() // 4)
        source = random_bytes(size, self.device)
        target = torch.empty_like(source)
        timing = self.time(lambda: target.copy_(source), 15)
        return 2 * size / timing.median, timing

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of a large matrix product, of random numbers: power, and with it the clock, depends on them."""
        left, right = (torch.randn(MATRIX, MATRIX, dtype=dtype, device=self.device) for _ in range(2))
        out = torch.empty_like(left)
        timing = self.time(lambda: torch.mm(left, right, out=out), 10)
        return 2 * MATRIX**3 / timing.median


def random_bytes(size: int, device: torch.device) -> torch.Tensor:
    """int32 [size / 4], random, so that nothing on the way can compress them."""
    return torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
