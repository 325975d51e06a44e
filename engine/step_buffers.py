"""The memory of a step's arrays: filled on the host, read on the device.

Knows names, shapes and types; not what any of them is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Final

import numpy as np
import torch

#: Arrays begin at multiples of this: kernels load 16 bytes at a time where they can rely on it.
_ALIGNMENT: Final = 16

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class StepBuffers:
    """Arrays by name on the host, and tensors of the same names and shapes on the device; zeros at first.

    On a CPU these are the same memory. On a device with memory of its own they are parts of one buffer, so that one
    copy brings them there, and there are two on the host: one is filled while the copy of the other may be on its way.
    The last of the shapes is a table of which only the rows in use are copied.
    """

    def __init__(self, shapes: Shapes, device: torch.device, *, separate: bool) -> None:
        """`separate` is true for a device that does not compute in the host's memory."""
        self._on_host = not separate
        size = sum(_aligned(shape, dtype) for shape, dtype in shapes.values())
        *_, (table_shape, table_dtype) = shapes.values()
        self._small_bytes = size - _aligned(table_shape, table_dtype)
        self._row_bytes = table_shape[1] * table_dtype.itemsize
        count = 1 if self._on_host else 2
        hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(count)]
        self._sets = cycle([(host, {n: t.numpy() for n, t in _views(host, shapes).items()}) for host in hosts])
        self._host, self.array = next(self._sets)
        self._buffer = self._host if self._on_host else torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = _views(self._buffer, shapes)

    def next_arrays(self) -> dict[str, np.ndarray]:
        """The arrays to be filled now; `array` from here on."""
        self._host, self.array = next(self._sets)
        return self.array

    def send(self, num_rows: int) -> None:
        """What was filled, with `num_rows` rows of the block tables, to the device, without waiting."""
        if not self._on_host:
            count = self._small_bytes + num_rows * self._row_bytes
            self._buffer[:count].copy_(self._host[:count], non_blocking=True)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = int(np.prod(shape)) * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, shapes: Shapes) -> dict[str, torch.Tensor]:
    views, begin = {}, 0
    for name, (shape, dtype) in shapes.items():
        size = int(np.prod(shape)) * dtype.itemsize
        views[name] = buffer[begin : begin + size].view(dtype).view(shape)
        begin += _aligned(shape, dtype)
    return views
