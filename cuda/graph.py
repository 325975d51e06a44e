"""Records what a function launches on a CUDA device, so that it can be launched again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import WeakSet

import torch

#: Before a recording: kernels are compiled, libraries choose their algorithms and allocate what they keep.
_WARM_UPS: Final = 2


class BrokenDeviceError(Exception):
    """A recording failed, and since then torch cannot use the device's memory in this process as it should.

    Some versions of torch go on believing that a recording is under way. The cause is why it failed.
    """


class GraphRecorder:
    """Records functions into CUDA graphs that share one pool of memory.

    What is recorded must read its lengths from device memory, wait for nothing, and allocate through torch alone. Two
    graphs of one recorder must not be replayed at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  #: those that use the pool
        # Not the default stream: what other streams do waits for that one, which a recording does not allow. And one
        # for all recordings: cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it a few times, record it, and return what replays it on the current stream.

        Raises the first thing that failed, of `run` or of CUDA, which does not let everything be recorded; the current
        stream is as before then, too. Raises BrokenDeviceError where the device cannot be used after that.
        """
        try:
            return self._record(run)
        except Exception as exc:
            if _is_broken():
                raise BrokenDeviceError from exc
            raise

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            if not self._graphs:  # torch does not open a pool again of which all graphs are gone
                self._pool = torch.cuda.graph_pool_handle()
            self._capture(graph, run)
        finally:
            torch.cuda.set_stream(current)
            current.wait_stream(self._stream)
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        failures: list[Exception] = []
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    run()
                except Exception as exc:
                    failures.append(exc)
                    raise
        except Exception as exc:
            failures.append(exc)  # to end a recording in which something failed may fail, too
            raise failures[0] from None


def _is_broken() -> bool:
    """Whether torch fails in what it asks of itself before each recording, and whoever measures memory asks of it."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
