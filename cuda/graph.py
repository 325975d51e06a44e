"""Records what a function launches on a CUDA device, so that it can be launched again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

#: Before a recording: kernels are compiled, libraries choose their algorithms and allocate what they keep.
_WARM_UPS: Final = 2


class GraphRecorder:
    """Records functions into CUDA graphs that share one pool of memory.

    What is recorded must read its lengths from device memory, wait for nothing, and allocate through torch alone. Two
    graphs of one recorder must not be replayed at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it a few times, record it, and return what replays it on the current stream."""
        current = torch.cuda.current_stream(self._device)
        # Not on the default stream: what other streams do waits for that one, which a recording does not allow.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
