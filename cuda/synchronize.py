"""Waiting for a device."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Waits for all that was launched on `device`; on a CPU that has been computed already.

    Raises what went wrong on the device in the meantime.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
