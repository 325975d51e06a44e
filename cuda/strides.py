"""What the kernels ask of the memory layout of their arguments."""

from __future__ import annotations

import torch


def require_dense_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError, with the name, for a tensor whose last dimension is not contiguous.

    The kernels take any other strides; along the last dimension they read and write 16 bytes at once.
    """
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} is not contiguous: its strides are {tensor.stride()}")
