"""The attention backends by name, and what each needs before it can be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from inferq.cuda.availability import why_no_triton
from inferq.engine.decode_graphs import Capture
from inferq.engine.errors import SettingError

from .choice import Choice, Workload, by_speed, measure_decode
from .interface import AttentionBackend
from .reference import ReferenceAttention

#: Programs of a kernel that run at once where there is no device to ask: the interpreter runs one.
_INTERPRETED_MULTIPROCESSORS: Final = 1

Make = Callable[[Workload], AttentionBackend]


def choose_backends(name: str, capture: Capture | None, workload: Workload) -> list[Choice]:
    """What `EngineConfig.attention` names, in the order in which it is to be tried.

    `auto` is `torch` where Triton's kernels cannot run, and else all that can serve the workload, the fastest first; as
    graphs where `capture` records such. Raises ModelLoadError for a name that there is not, and for a backend that
    cannot be made here.
    """
    if name in BACKENDS:
        return [Choice(BACKENDS[name](workload), "asked for")]
    if name != "auto":
        raise SettingError(
            "attention", f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}"
        )
    if (reason := why_no_triton(workload.device)) is not None or workload.device.type != "cuda":
        return [Choice(_torch(workload), reason or f"the device is a {workload.device.type.upper()}")]
    candidates = {each: partial(make, workload) for each, make in BACKENDS.items()}
    return by_speed(candidates, workload, partial(measure_decode, capture))


def _flash(workload: Workload) -> AttentionBackend:
    _require_triton("flash", workload.device)
    from .flash import FlashAttention

    return FlashAttention()


def _triton(workload: Workload) -> AttentionBackend:
    device = workload.device
    _require_triton("triton", device)
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


def _require_triton(name: str, device: torch.device) -> None:
    """`flash` needs it, too: what writes the cache is a Triton kernel."""
    if (reason := why_no_triton(device)) is not None:
        raise SettingError("attention", f"attention {name!r} cannot be had: {reason}; use --attention auto or torch")


#: What `EngineConfig.attention` may name besides `auto`.
BACKENDS: Final[Mapping[str, Make]] = {"flash": _flash, "triton": _triton, "torch": _torch}
