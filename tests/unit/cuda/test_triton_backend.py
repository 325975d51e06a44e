"""The Triton backend's launches at the sizes of large engines, on a card that is not there."""

from __future__ import annotations

import pytest
import torch
from support.compiled import SM_90, absent, launches

from inferq.engine.attention import AttentionParams, LayerShape
from inferq.engine.attention.triton import TritonAttention
from inferq.engine.batch import StepBatch
from inferq.engine.decode_graphs import LARGEST_BUCKET
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")
META = torch.device("meta")


def decoding(key: int) -> Scheduled:
    sequence = Sequence(key, [0] * 9, 9, SequenceSampling(max_tokens=1), num_computed_tokens=8, block_table=[key])
    return Scheduled(sequence, 1)


def grids_of(max_seqs: int, steps: list[int]) -> dict[int, tuple[int, int, int]]:
    """The grids of decodes of so many rows each, one after the other."""
    backend = TritonAttention(max_seqs=max_seqs, max_context=4096, multiprocessors=132)
    backend.allocate([LayerShape(1, 128, 128)], 600, dtype=torch.bfloat16, device=META)
    batch = StepBatch(max_tokens=600, max_seqs=600, max_model_len=4096, block_size=backend.block_size, device=META)
    grids = {}
    with launches(SM_90) as launched:
        for rows in steps:
            batch.fill([decoding(key) for key in range(rows)])
            backend.prepare(batch)
            query, entry = absent(rows, 8, 128, dtype=torch.bfloat16), absent(rows, 1, 128, dtype=torch.bfloat16)
            assert backend.attend(0, query, entry, entry, AttentionParams(0.1)).shape == (rows, 8, 128)
            grids[rows] = next(launch.grid for launch in launched if launch.kernel == "_split_kernel")
            launched.clear()
    return grids


def test_the_gates_sequences_fit_though_fewer_may_run_at_once() -> None:
    assert grids_of(1, [1, 3]) == {1: (1, 1, 32), 3: (3, 1, 32)}


def test_steps_of_every_size_have_the_workspace_that_they_need() -> None:
    """Beyond the largest bucket rows are not padded, and are split like it."""
    grids = grids_of(600, [1, 3, 64, LARGEST_BUCKET, LARGEST_BUCKET + 1, 527, 528, 600])
    splits = {rows: grid[2] for rows, grid in grids.items()}
    assert splits == {1: 32, 3: 32, 64: 16, 512: 2, 513: 2, 527: 2, 528: 2, 600: 2}
    assert all(grid[0] == rows for rows, grid in grids.items())
