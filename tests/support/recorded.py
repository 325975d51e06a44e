"""A stand-in for CUDA graphs that finds what a graph would get wrong.

A graph replays the launches that it recorded: with the sizes, the numbers and the addresses of that time. This one
runs the function anew and fails where a launch, of torch or of Triton's interpreter, differs from the recorded one in
anything but what the tensors hold. Recording and replay must not wait for the device, so what would make a host wait
for one fails too, by its name: reading a tensor, a result whose size follows from what a tensor holds, and a tensor
made from numbers of the host. On a CPU nothing tells a tensor's own device from another one's, so that of moving to the
host only the name "cpu" is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

#: Operations that would wait for the device: they give the host a number, or their result's size is one.
_WAITS = frozenset(
    "_local_scalar_dense nonzero equal allclose masked_select bincount _unique2 unique_dim unique_consecutive".split()
)
#: Functions that do, of which torch's dispatcher is not told on a CPU.
_READS = frozenset("tolist cpu numpy __array__ __repr__".split())
#: Functions that make a tensor from the host's numbers; and such that make one there if no device is named.
_FROM_HOST = frozenset("tensor new_tensor from_numpy frombuffer".split())
_ON_HOST = frozenset("arange empty eye full linspace ones rand randint randn zeros".split())


class RerunRecorder:
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
        inputs = (args, kwargs or {})
        assert not _waits(name, *inputs), f"{name} would wait for the device"
        if name == "lift_fresh":
            self._launches.add(name, args[0].item())
            inputs = ()
        else:
            self._launches.add(name, inputs)
        outputs = func(*args, **(kwargs or {}))
        self._launches.note_made(inputs, outputs)
        return outputs


def _waits(operation: str, args: Any, kwargs: Any) -> bool:
    if operation in ("index", "index_put_", "index_put", "_index_put_impl_"):
        # By a mask: how many it takes is counted first.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if operation == "repeat_interleave":
        return kwargs.get("output_size") is None
    # A number alone is an argument of the launch that writes it.
    return operation in _WAITS or (operation == "lift_fresh" and args[0].dim() > 0)


class _WatchFunctions(TorchFunctionMode):
    """Sees what torch does without its dispatcher, while not `paused`."""

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            name, kwargs = getattr(func, "__name__", ""), kwargs or {}
            moves = name == "to" and "cpu" in (*args[1:2], kwargs.get("device"))
            assert not moves and name not in _READS, f"{name} would wait for the device"
            assert name not in _FROM_HOST, f"{name} would copy from the host, and wait for the device"
            assert name not in _ON_HOST or "device" in kwargs, f"{name} makes a tensor on the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def _launches() -> Iterator[_Launches]:
    launches, functions = _Launches(), _WatchFunctions()
    run = InterpretedFunction.run

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.add(self.fn.__name__, (args, kwargs), grid)
        # What the interpreter does with torch to imitate a kernel is no launch.
        functions.paused = True
        try:
            with _disable_current_modes():
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            functions.paused = False

    InterpretedFunction.run = watched
    try:
        with _Watch(launches), functions:
            yield launches
    finally:
        InterpretedFunction.run = run
