"""A stand-in for CUDA graphs that finds what a graph would get wrong.

A graph replays the launches that it recorded: with the sizes, the numbers and the addresses of that time. This one
runs the function anew and fails where a launch, of torch or of Triton's interpreter, differs from the recorded one in
anything but what the tensors hold. Recording and replay must not wait for the device, so reading a tensor fails too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

#: What would wait for the device, or take its result's size from a tensor.
_WAITS = ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select")


class GraphRecorder:
    """A Capture. `recorded` are the launches of each graph, in the order of their recording."""

    def __init__(self) -> None:
        self.recorded: list[list[tuple[Any, ...]]] = []
        self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # warm
        with _launches() as launches:
            run()
        assert launches.entries
        self.recorded.append(launches.entries)

        def replay() -> None:
            self.replays += 1
            with _launches() as again:
                run()
            assert len(again.entries) == len(launches.entries), "a replay would have other launches"
            for before, now in zip(launches.entries, again.entries, strict=True):
                assert before == now, "a replay would use what was true when it was recorded"

        return replay


class _Launches:
    """What was launched, as it would be repeated.

    A tensor that no launch made was there before, and is known by its address. One that was made on the way gets its
    memory anew in this imitation, and is known by its size alone.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self._made: set[int] = set()

    def add(self, name: str, inputs: Any, grid: Any = None) -> None:
        self.entries.append((name, grid, repr(tree_map(self._described, inputs))))

    def note_made(self, inputs: Any, outputs: Any) -> None:
        """Views of what was given, and what was written in place, are not made."""
        self._made |= _storages(outputs) - _storages(inputs)

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        address = None if _storages(leaf) <= self._made else leaf.data_ptr()
        return "tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype, address


def _storages(tensors: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)}


class _Watch(TorchDispatchMode):
    def __init__(self, launches: _Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _WAITS, f"{name} would wait for the device"
        inputs = (args, kwargs or {})
        self._launches.add(name, inputs)
        outputs = func(*args, **(kwargs or {}))
        self._launches.note_made(inputs, outputs)
        return outputs


@contextmanager
def _launches() -> Iterator[_Launches]:
    launches = _Launches()
    run = InterpretedFunction.run

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.add(self.fn.__name__, (args, kwargs), grid)
        # What the interpreter does with torch to imitate a kernel is no launch.
        with _disable_current_modes():
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = watched
    try:
        with _Watch(launches):
            yield launches
    finally:
        InterpretedFunction.run = run
