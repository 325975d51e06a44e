"""Rewrites a loaded transformers model in place, so that it computes the same with fewer and larger operations.

Nothing is known here of architectures. Modules are recognised by what one forward pass shows and by what they answer
to random numbers; what is not exactly of a known form stays as it is. The operations are the caller's.
"""

from __future__ import annotations

from typing import Any

import torch

from .layers import fuse_layers
from .mlp import fuse_mlps
from .norms import fuse_norms
from .ops import AddRmsNorm, Ops, RmsNorm
from .projections import fuse_projections
from .rewrite import Rewrites
from .rotary import defer_rotations, intercept_rotations
from .trace import Trace

__all__ = ["AddRmsNorm", "Fusion", "Ops", "RmsNorm", "fuse"]


class Fusion:
    """What was done to a model. `report` is how many modules of each kind, for a log."""

    def __init__(self, report: dict[str, int], rewrites: Rewrites) -> None:
        self.report = report
        self._rewrites = rewrites

    def undo(self) -> None:
        """The model then computes as before. Weights that became views of a joined matrix remain that."""
        self._rewrites.undo()


def fuse(model: Any, ops: Ops, *, rotary: bool) -> Fusion:
    """Rewrites `model` in place, so that it computes by `ops` what it computed before.

    From then on the model calls our attention (`attention.hook.IMPLEMENTATION`), and must not be moved or cast: parts
    of it are views of joined weights. With `rotary`, an attention that has `attend_rotary` is given queries and keys
    unrotated. What an operation or the model raises is raised as it comes, and the modules are as they were.
    """
    modules = list(model.modules())
    rewrites = Rewrites()
    # Parameters that are used outside of inference mode cannot come to hold a tensor that is made in it.
    with torch.inference_mode(False), torch.no_grad():
        try:
            intercept_rotations(modules)
            trace = Trace(model)
            norms = fuse_norms(modules, trace, ops, rewrites)
            mlps = fuse_mlps(modules, trace, ops, rewrites)
            layers, carried = fuse_layers(modules, trace, norms, rewrites)
            projections = fuse_projections(modules, trace, rewrites)
            rotations = defer_rotations(modules, trace, rewrites) if rotary else 0
        except BaseException:
            rewrites.undo()
            raise
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the separate weights: what is free is measured next
    report = {"norms": len(norms), "mlps": mlps, "layers": layers, "carried_adds": carried}
    return Fusion(report | {"projections": projections, "rotations": rotations}, rewrites)
