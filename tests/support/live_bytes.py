"""How much memory a piece of code takes: what its tensors hold while they live, on whatever device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # without autograd, operations that are made of others come as a whole
            if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in given or address in self._known:
            return

        def dies() -> None:
            self._known.discard(address)
            self.live -= size

        self._known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, dies)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the tensors which `run` makes hold at a time. What is inside of an operation is not seen."""
    with _LiveBytes() as counted:
        run()
    return counted.peak
