"""The flat arrays of a step: what is where, and that nothing of an earlier step is left in sight."""

from __future__ import annotations

import random

import pytest
import torch

from inferq.engine.batch import StepBatch
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

SIZE = 4


@pytest.fixture
def batch() -> StepBatch:
    return StepBatch(max_tokens=64, max_seqs=4, max_model_len=30, block_size=SIZE, device=torch.device("cpu"))


def sequence(key: int, tokens: list[int], computed: int, table: list[int]) -> Sequence:
    return Sequence(
        key,
        tokens,
        len(tokens),
        SequenceSampling(max_tokens=9),
        num_computed_tokens=computed,
        block_table=table,
    )


def test_a_prefill_a_chunk_and_a_decode_side_by_side(batch: StepBatch) -> None:
    whole = Scheduled(sequence(0, [10, 11, 12, 13, 14], 0, [7, 2]), 5)
    chunk = Scheduled(sequence(1, list(range(20, 30)), 3, [5, 1, 0]), 4)
    decode = Scheduled(sequence(2, list(range(30, 39)), 8, [3, 6, 4]), 1)
    batch.fill([whole, chunk, decode])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 23, 24, 25, 26, 38]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 8]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 8, 23, 4, 5, 6, 16]
    assert batch.query_starts.tolist() == [0, 5, 9, 10]
    assert batch.seq_lens.tolist() == [5, 7, 9]
    assert batch.host_lens == [(5, 5), (4, 7), (1, 9)]
    assert [row[:n].tolist() for row, n in zip(batch.block_tables, (2, 2, 3), strict=True)] == [
        [7, 2],
        [5, 1],
        [3, 6, 4],
    ]
    assert batch.sample_rows.tolist() == [4, 9]
    assert batch.new_blocks.tolist() == [7, 2, 1, 4]


def test_the_arrays_are_reused_and_show_the_current_step_alone(batch: StepBatch) -> None:
    batch.fill([Scheduled(sequence(0, list(range(20)), 0, [0, 1, 2, 3, 4]), 20)] * 3)
    address = batch.input_ids.data_ptr()
    batch.fill([Scheduled(sequence(1, [7, 8], 1, [9]), 1)])
    assert batch.input_ids.data_ptr() == address
    assert batch.input_ids.tolist() == [8]
    assert batch.slot_mapping.tolist() == [37]
    assert batch.block_tables.shape[0] == 1
    assert batch.new_blocks.tolist() == []
    assert batch.sample_rows.tolist() == [0]


def test_a_step_may_sample_nothing(batch: StepBatch) -> None:
    batch.fill([Scheduled(sequence(0, list(range(9)), 0, [0, 1, 2]), 8)])
    assert batch.num_samples == 0
    assert batch.sample_rows.tolist() == []


def test_blocks_given_ahead_of_their_tokens_are_no_part_of_the_step(batch: StepBatch) -> None:
    batch.fill([Scheduled(sequence(0, list(range(12)), 0, [5, 6, 7]), 4)])
    assert batch.new_blocks.tolist() == [5]


def test_each_block_is_new_exactly_once_whatever_the_chunks(batch: StepBatch) -> None:
    rng = random.Random(1)
    for _ in range(50):
        length = rng.randrange(1, 29)
        table = rng.sample(range(50), -(-length // SIZE))
        one, seen = sequence(0, list(range(length)), 0, table), []
        while one.num_computed_tokens < length:
            count = rng.randint(1, length - one.num_computed_tokens)
            batch.fill([Scheduled(one, count)])
            seen += batch.new_blocks.tolist()
            one.num_computed_tokens += count
        assert seen == table


def decoding(key: int, length: int, table: list[int], **sampling: object) -> Sequence:
    settings = SequenceSampling(max_tokens=9, **sampling)
    return Sequence(key, list(range(length)), length, settings, num_computed_tokens=length - 1, block_table=table)


def test_padding_rows_decode_nothing_into_nowhere(batch: StepBatch) -> None:
    batch.fill([Scheduled(sequence(0, list(range(20)), 0, [0, 1, 2, 3, 4]), 20)] * 3)  # what was there before
    batch.fill([Scheduled(decoding(7, 6, [3, 8], temperature=0.5, seed=-4), 1)], rows=3)
    assert (batch.num_seqs, batch.num_tokens, batch.num_decodes, batch.num_samples) == (3, 3, 3, 3)
    assert batch.input_ids.tolist() == [5, 0, 0]
    assert batch.positions.tolist() == [5, 0, 0]
    assert batch.slot_mapping.tolist() == [33, -1, -1]
    assert batch.seq_lens.tolist() == [6, 0, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 3]
    assert batch.block_tables[1:].count_nonzero() == 0
    assert batch.sample_rows.tolist() == [0, 1, 2]
    assert batch.temperature.tolist() == [0.5, 0, 0]
    assert batch.sample_positions.tolist() == [6, 0, 0]
    assert batch.seeds.tolist() == [-4, 0, 0]


def test_a_batch_of_padding_alone(batch: StepBatch) -> None:
    batch.fill([], rows=4)
    assert batch.slot_mapping.tolist() == [-1] * 4
    assert batch.seq_lens.tolist() == [0] * 4


def test_each_sample_has_its_own_sampling(batch: StepBatch) -> None:
    greedy = Scheduled(decoding(0, 2, [0], temperature=1e-6, top_k=3), 1)
    first = Scheduled(decoding(1, 3, [1], temperature=2.0, top_k=1), 1)
    chunk = Scheduled(sequence(2, list(range(9)), 0, [2, 3, 4]), 5)
    nucleus = Scheduled(decoding(3, 5, [5, 6], temperature=0.25, top_k=7, top_p=0.9, seed=2**63 - 1), 1)
    batch.fill([greedy, first, chunk, nucleus])
    assert batch.num_decodes == 2
    assert batch.sample_rows.tolist() == [0, 1, 7]
    assert batch.temperature.tolist() == [0, 0, 0.25]
    assert (batch.top_k.tolist()[2], batch.top_p.tolist()[2], batch.seeds.tolist()[2]) == (7, 0.9, 2**63 - 1)
    assert batch.sample_positions.tolist() == batch.host_sample_positions == [2, 3, 5]
    assert [each.top_k for each in batch.samplings] == [3, 1, 7]


def test_a_pending_token_is_the_one_that_the_step_before_samples(batch: StepBatch) -> None:
    """Of three that the step before samples for, two go on, in another order, beside one that it did not have."""
    before = [decoding(key, 4 + key, [key, key + 10]) for key in range(3)]
    batch.fill([Scheduled(each, 1) for each in before])
    batch.sampled.copy_(torch.tensor([100, 101, 102]))
    for each in before:
        each.num_computed_tokens += 1
        each.num_pending_tokens += 1
    batch.fill([Scheduled(before[2], 1), Scheduled(decoding(9, 2, [7]), 1), Scheduled(before[0], 1)], rows=4)
    assert batch.input_ids.tolist() == [102, 1, 100, 0]
    assert batch.positions.tolist() == [6, 1, 4, 0]
    assert batch.sample_positions.tolist() == [7, 2, 5, 0]


def test_the_arrays_stay_where_they_are_and_begin_at_multiples_of_16_bytes(batch: StepBatch) -> None:
    names = [name for name, value in vars(StepBatch).items() if isinstance(value, property) and "host" not in name]

    def addresses() -> dict[str, int]:
        return {name: getattr(batch, name).data_ptr() for name in names}

    whole = [Scheduled(sequence(0, list(range(20)), 0, [0, 1, 2, 3, 4]), 20)]
    batch.fill(whole)
    first = addresses()
    batch.fill([], rows=4)
    batch.fill(whole * 3)
    assert addresses() == first
    assert all(address % 16 == 0 for address in first.values())
