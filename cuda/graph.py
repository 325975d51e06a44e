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
        # Not the default stream: what other streams do waits for that one, which a recording does not allow. And one
        # for all recordings: cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it a few times, record it, and return what replays it on the current stream.

        Raises what `run` raises, and what CUDA does not let be recorded; the current stream is as before then, too.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
        finally:
            torch.cuda.set_stream(current)
            current.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay
