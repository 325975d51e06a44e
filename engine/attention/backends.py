"""The attention backends by name, and what each needs before it can be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from inferq.cuda.support import triton_runs_on
from inferq.engine.decode_graphs import Capture
from inferq.engine.errors import ModelLoadError

from .choice import Choice, Workload, fastest, measure_decode
from .interface import AttentionBackend
from .reference import ReferenceAttention

#: Programs of a kernel that run at once where there is no device to ask: the interpreter runs one.
_INTERPRETED_MULTIPROCESSORS: Final = 1

Make = Callable[[Workload], AttentionBackend]


def choose_backend(name: str, capture: Capture | None, workload: Workload) -> Choice:
    """The backend that `EngineConfig.attention` names.

    `auto` is `torch` on a CPU, and on a CUDA device the fastest that can serve the workload, as a graph where `capture`
    records graphs. Raises ModelLoadError for
    a name that there is not, and for a backend that cannot be made here.
    """
    if name in BACKENDS:
        return Choice(BACKENDS[name](workload), "asked for")
    if name != "auto":
        raise ModelLoadError(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    if workload.device.type == "cpu":
        return Choice(_torch(workload), "the device is a CPU")
    measure = partial(measure_decode, capture)
    return fastest({each: partial(make, workload) for each, make in BACKENDS.items()}, workload, measure)


def _flash(workload: Workload) -> AttentionBackend:
    if not triton_runs_on(workload.device):
        raise ModelLoadError(f"attention flash needs a CUDA device and triton; the device is {workload.device}")
    from .flash import FlashAttention

    return FlashAttention()


def _triton(workload: Workload) -> AttentionBackend:
    device = workload.device
    if not triton_runs_on(device):
        raise ModelLoadError(
            f"attention triton needs a CUDA device and triton, which comes with torch's CUDA builds, not {device}"
        )
    from .triton import TritonAttention

    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        multiprocessors = _INTERPRETED_MULTIPROCESSORS
    return TritonAttention(
        max_seqs=workload.max_seqs, max_context=workload.max_context, multiprocessors=multiprocessors
    )


def _torch(_: Workload) -> AttentionBackend:
    return ReferenceAttention()


#: What `EngineConfig.attention` may name besides `auto`.
BACKENDS: Final[Mapping[str, Make]] = {"flash": _flash, "triton": _triton, "torch": _torch}
