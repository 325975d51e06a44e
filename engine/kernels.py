"""The Triton kernels that a model runs on besides attention, where they can run: on a CUDA device, or interpreted.

Only here, and in the backends that need it, does the engine reach into what imports Triton; it does so when a device
asks for it, so that a CPU worker needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fusion import Ops
from .runner import Sampler


@dataclass(frozen=True, slots=True)
class Kernels:
    """What fused modules compute by, and a sampler that waits for nothing."""

    ops: Ops
    sampler: Sampler


def load_kernels() -> Kernels:
    """Raises ImportError without Triton."""
    from inferq.cuda.activation import gated
    from inferq.cuda.norm import add_rms_norm, rms_norm
    from inferq.cuda.sampling import sample

    from .batch import StepBatch

    def sampler(logits: torch.Tensor, batch: StepBatch) -> None:
        sample(
            logits,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.seeds,
            batch.sample_positions,
            batch.sampled,
        )

    return Kernels(Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, gated=gated), sampler)
