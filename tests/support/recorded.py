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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import InterpretedFunction

#: What would wait for the device, or take its result's size from a tensor.
_WAITS = ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select")


class GraphRecorder:
    """A Capture. `rows` are the token counts of what was recorded, in order; `replays` counts."""

    def __init__(self) -> None:
        self.recorded: list[list[tuple[Any, ...]]] = []
        self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # warm
        with _launches() as launches:
            run()
        assert launches
        self.recorded.append(launches)

        def replay() -> None:
            self.replays += 1
            with _launches() as again:
                run()
            assert len(again) == len(launches), "a replay would have other launches"
            for before, now in zip(launches, again, strict=True):
                assert before == now, "a replay would use what was true when it was recorded"

        return replay


class _Watch(TorchDispatchMode):
    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _WAITS, f"{name} would wait for the device"
        self._launches.append((name, _described((args, kwargs))))
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> str:
    def each(leaf: Any) -> Any:
        return ("tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    return repr(tree_map(each, value))


@contextmanager
def _launches() -> Iterator[list[tuple[Any, ...]]]:
    launches: list[tuple[Any, ...]] = []
    run = InterpretedFunction.run

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append((self.fn.__name__, grid, _described((args, kwargs))))
        # What the interpreter does with torch to imitate a kernel is no launch.
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = watched
    try:
        with _Watch(launches):
            yield launches
    finally:
        InterpretedFunction.run = run
