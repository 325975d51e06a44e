"""Decode steps as graphs: which sizes there are, and which of them a step is padded to.

A graph is recorded once for each bucket, over buffers that stay where they are, and replayed for every step of as many
rows or fewer. Knows neither CUDA nor a model: whoever records a graph is given, and so is what is recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

#: Runs the given function once or several times, and returns one that does the same again on the same buffers.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

#: A larger decode step is none: its kernels take longer than their launches.
LARGEST_BUCKET: Final = 512


def decode_buckets(max_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs of an engine that runs `max_seqs` sequences at once, ascending.

    1, 2, 4, then multiples of 8 up to 256 and of 16 up to LARGEST_BUCKET, so that at most a few rows are padding; the
    last one is `max_seqs` itself where that is no more.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_BUCKET + 1, 16)]
    below = [size for size in sizes if size < max_seqs]
    return (*below, max_seqs) if max_seqs <= LARGEST_BUCKET else tuple(below)


def bucket_for(rows: int, buckets: Seq[int]) -> int | None:
    """The smallest of the ascending `buckets` that holds so many rows; None where none does."""
    place = bisect_left(buckets, rows)
    return buckets[place] if place < len(buckets) else None


class DecodeGraphs:
    """One recorded decode step for each of the `buckets`."""

    def __init__(self, buckets: Seq[int]) -> None:
        self._buckets = tuple(buckets)
        self._replays: dict[int, Callable[[], None]] = {}

    def record(self, capture: Capture, prepare: Callable[[int], None], run: Callable[[], None]) -> None:
        """Record `run` for each bucket; `prepare(bucket)` makes the buffers those of so many rows of padding.

        The largest comes first: the smaller ones then find room in the memory that it took.
        """
        for bucket in reversed(self._buckets):
            prepare(bucket)
            self._replays[bucket] = capture(run)

    def bucket_for(self, rows: int) -> int | None:
        """To how many rows a decode step of `rows` is padded; None where it is run without a graph."""
        return bucket_for(rows, self._buckets)

    def replay(self, bucket: int) -> None:
        """Run the step that the buffers hold now, of `bucket` rows."""
        self._replays[bucket]()
