"""Which sizes of decode steps are recorded, and which of them a step is padded to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inferq.engine.decode_graphs import DecodeGraphs, bucket_for, decode_buckets


def test_buckets_are_dense_enough_and_end_with_the_limit() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(3) == (1, 2, 3)
    assert decode_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_buckets(70)[-2:] == (64, 70)
    assert decode_buckets(512)[-3:] == (480, 496, 512)
    assert decode_buckets(4096) == decode_buckets(512)


@pytest.mark.parametrize("max_seqs", [1, 5, 64, 100, 300, 512, 600])
def test_the_bucket_of_a_step_is_the_smallest_that_holds_it(max_seqs: int) -> None:
    buckets = decode_buckets(max_seqs)
    for rows in range(1, max_seqs + 1):
        expected = min((bucket for bucket in buckets if bucket >= rows), default=None)
        assert bucket_for(rows, buckets) == expected
        assert expected is not None or rows > 512


class Recorder:
    """A stand-in for what records graphs: a graph is the function itself, on the buffers that it was recorded with."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.log.append("record")
        run()

        def replay() -> None:
            self.log.append("replay")
            run()

        return replay


def test_each_bucket_is_recorded_once_the_largest_first_and_replayed() -> None:
    recorder, graphs = Recorder(), DecodeGraphs((1, 2, 4))
    prepared: list[int] = []
    ran: list[int] = []
    graphs.record(recorder, prepared.append, lambda: ran.append(prepared[-1]))
    assert (prepared, ran, recorder.log) == ([4, 2, 1], [4, 2, 1], ["record"] * 3)
    assert [graphs.bucket_for(rows) for rows in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    prepared.append(2)
    graphs.replay(2)
    assert ran[-1] == 2 and recorder.log[-1] == "replay"
