"""Whether Triton's kernels can run here. Loads no Triton."""

from __future__ import annotations

import importlib.util
import os

import torch


def triton_runs_on(device: torch.device) -> bool:
    """True on a CUDA device, and with TRITON_INTERPRET=1 on a CPU, where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
