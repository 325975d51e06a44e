"""Whether Triton's kernels can run here, which is told without loading it."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

import torch

#: Tensor cores for bfloat16 and asynchronous copies: Ampere and newer.
MIN_CAPABILITY: Final = (8, 0)


def why_no_triton(device: torch.device) -> str | None:
    """What keeps Triton's kernels from running on `device`, in a few words; None where they run.

    They also run on a CPU, with TRITON_INTERPRET=1.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with torch's CUDA builds"
    if device.type != "cuda":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else f"the device is a {device.type.upper()}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        major, minor = capability
        return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and 8.0 is needed"
    return None


def triton_version() -> str:
    """By itself: builds of torch have brought it as packages of several names. Raises ImportError without it."""
    import triton

    return str(triton.__version__)
