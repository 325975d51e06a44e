"""Part 5: a decode step replayed as a graph gives the bits of an eager one, and takes no longer than its kernels."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from figures import Figure

from inferq.engine.runner import ModelRunner

from .card import Card, Timing
from .engine import KeptGraphs, launch_decode

#: How much longer than its kernels together a replay may take.
BOUND: Final = 0.03
REPEATS: Final = 30
#: What no logit is, so that a graph that leaves none shows.
UNWRITTEN: Final = -12345.0


class GraphResult(NamedTuple):
    equal: bool  #: replayed and eager logits, to the bit
    replay: Timing
    eager: Timing
    kernels: float | None  #: the sum of the kernels' times in one replay; None where the profiler saw none

    @property
    def overhead(self) -> float | None:
        return None if self.kernels is None else self.replay.median / self.kernels - 1


@torch.inference_mode()
def measure_graph(
    runner: ModelRunner, graphs: KeptGraphs, card: Card, *, rows: int, context: int
) -> GraphResult | None:
    """None where no graph of so many rows was recorded."""
    recorded = graphs.kept
    if recorded is None:
        return None
    launch_decode(runner, rows=rows, context=context)  # fills the arrays that graph and function read
    recorded.run()
    eager = graphs.last_logits.clone()
    recorded.logits.fill_(UNWRITTEN)
    recorded.replay()
    card.synchronize()
    equal = same_bits(recorded.logits, eager)
    return GraphResult(
        equal,
        card.time(recorded.replay, REPEATS),
        card.time(recorded.run, REPEATS),
        card.kernel_seconds(recorded.replay),
    )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Also of NaN, which a slot of the cache may hold that no token was written to yet."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def graph_figures(result: GraphResult) -> list[Figure]:
    figures = [
        Figure("decode step replayed", result.replay.median * 1000, "ms"),
        Figure("decode step run eagerly", result.eager.median * 1000, "ms"),
    ]
    if result.kernels is not None and result.overhead is not None:
        figures += [
            Figure("its kernels together", result.kernels * 1000, "ms"),
            Figure("graph overhead", result.overhead, "", BOUND, digits=3),
        ]
    return figures
