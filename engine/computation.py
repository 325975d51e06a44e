"""Chooses what computes a model: the attention that serves it, whether its modules are fused, and what samples.

All of it is tried on the model itself before it is taken: who fails there is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from inferq.cuda.synchronize import synchronize

from .assets import first_line
from .attention import AttentionBackend
from .attention.choice import Choice
from .attention.hook import rotates
from .batch import StepBatch
from .conformance import Gate
from .errors import ModelLoadError
from .fusion import fuse
from .kernels import Kernels
from .model import LoadedModel, Log
from .runner import Sampler, sample_on_host


def first_to_pass(gate: Gate, model: Any, choices: Seq[Choice], kernels: Kernels | None, log: Log) -> AttentionBackend:
    """Raises ModelLoadError, that of the last one, if the gate refuses the model with all of them."""
    *others, last = choices
    for choice in others:
        try:
            _pass_gate(gate, model, choice.backend, kernels, log)
        except ModelLoadError as exc:
            log("warning", "attention passed over", backend=choice.backend.name, reason=str(exc))
        else:
            return _chosen(choice, log)
    _pass_gate(gate, model, last.backend, kernels, log)
    return _chosen(last, log)


def _chosen(choice: Choice, log: Log) -> AttentionBackend:
    backend = choice.backend
    log("info", "attention chosen", backend=backend.name, kernels=backend.kernels, reason=choice.reason)
    return backend


def _pass_gate(gate: Gate, model: Any, backend: AttentionBackend, kernels: Kernels | None, log: Log) -> None:
    """With fused modules if the model is right with them, else without. Raises ModelLoadError."""
    if kernels is not None:
        for rotary in (True, False) if rotates(backend) else (False,):
            if _fuses(gate, model, backend, kernels, log, rotary=rotary):
                return
    gate.check(backend)


def _fuses(gate: Gate, model: Any, backend: AttentionBackend, kernels: Kernels, log: Log, *, rotary: bool) -> bool:
    """False, with the model as it was, where the gate refuses it or a kernel fails."""
    fusion = None
    try:
        fusion = fuse(model, kernels.ops, rotary=rotary)
        gate.check(backend)
    except Exception as exc:
        if fusion is not None:
            fusion.undo()
        log("warning", "modules are not fused", rotary=rotary, reason=f"{type(exc).__name__}: {first_line(exc)}")
        return False
    log("info", "modules fused", **fusion.report)
    return True


def sampler_that_works(kernels: Kernels, loaded: LoadedModel, log: Log) -> Sampler:
    """The kernels' own, tried on one row of the model's logits, or the host's."""
    batch = StepBatch(max_tokens=1, max_seqs=1, max_model_len=1, block_size=1, device=loaded.device)
    batch.fill([], rows=1)
    try:
        kernels.sampler(torch.zeros(1, loaded.vocab_size, dtype=loaded.dtype, device=loaded.device), batch)
        synchronize(loaded.device)  # a launch returns before it can fail
    except Exception as exc:
        log("warning", "tokens are sampled by the host", reason=f"{type(exc).__name__}: {first_line(exc)}")
        return sample_on_host
    return kernels.sampler
