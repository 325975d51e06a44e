"""Records a runner's decode steps as graphs, or says why there are none.

Whether a step cannot be recorded, or finds no memory for its recording, does not always show in what fails: the
allocator's own attempts to find some are not allowed meanwhile, and fail in other words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import torch

from inferq.cuda.graph import BrokenDeviceError
from inferq.cuda.memory import free_bytes, is_shortage, peak_bytes

from .assets import first_line
from .attention.choice import broken_by_recording
from .decode_graphs import Capture
from .errors import ModelLoadError
from .model import Log
from .runner import ModelRunner

_NO_MEMORY: Final = (
    "not enough memory for CUDA graphs: lower max_num_seqs or gpu_memory_utilization, or set enforce_eager"
)


def record(runner: ModelRunner, capture: Capture, buckets: Seq[int], largest: Callable[[], None], log: Log) -> None:
    """A graph for each of the buckets, as far as they can be had: where a model does not let itself be recorded, none.

    `largest` runs a decode step of the largest bucket, to measure what it takes. Raises ModelLoadError where there is
    too little memory, and where a failure leaves the device broken for this process.
    """
    start = time.monotonic()
    device = torch.device(runner.facts.device)
    needed = 0
    try:
        needed = peak_bytes(largest, device)
        runner.record_graphs(buckets, capture)
    except Exception as exc:
        cause = exc.__cause__ if isinstance(exc, BrokenDeviceError) and isinstance(exc.__cause__, Exception) else exc
        _check_memory(cause, needed, device)
        if isinstance(exc, BrokenDeviceError):
            raise broken_by_recording(runner.facts.attention, exc) from exc
        log("warning", "decode steps run without graphs", reason=f"{type(exc).__name__}: {first_line(exc)}")
    else:
        seconds = round(time.monotonic() - start, 1)
        log("info", "decode graphs recorded", graphs=len(buckets), largest=buckets[-1], seconds=seconds)


def _check_memory(cause: Exception, needed: int, device: torch.device) -> None:
    """Raises ModelLoadError if a lack of memory is why a recording failed."""
    if is_shortage(cause):
        raise ModelLoadError(f"{_NO_MEMORY}: {first_line(cause)}") from cause
    # A graph keeps what its step takes.
    if needed and (free := free_bytes(device)) < needed:
        sizes = f"a decode step takes {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free"
        raise ModelLoadError(f"{_NO_MEMORY}: {sizes}") from cause
