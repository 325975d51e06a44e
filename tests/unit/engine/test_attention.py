"""The reference attention against a dense computation in float64, one query and one head at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferq.engine.attention import AttentionParams, LayerShape, block_bytes
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

HEADS, KV_HEADS, DIM = 9, 3, 16
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300)
CPU = torch.device("cpu")


class Case:
    """Sequences of the given lengths, their tensors, and a pool whose blocks are handed out in random order."""

    def __init__(
        self,
        lengths: Seq[int],
        block_size: int,
        *,
        dim: int = DIM,
        value_dim: int = DIM,
        heads: int = HEADS,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.block_size = block_size
        self.query = [torch.randn(n, heads, dim, generator=generator) for n in lengths]
        self.key = [torch.randn(n, KV_HEADS, dim, generator=generator) for n in lengths]
        self.value = [torch.randn(n, KV_HEADS, value_dim, generator=generator) for n in lengths]
        self.shape = LayerShape(KV_HEADS, dim, value_dim)
        counts = [-(-n // block_size) for n in lengths]
        self.num_blocks = sum(counts) + 3
        blocks = random.Random(seed).sample(range(self.num_blocks), self.num_blocks)
        self.sequences = [
            Sequence(key, [0] * n, n, SequenceSampling(max_tokens=1), block_table=[blocks.pop() for _ in range(count)])
            for key, (n, count) in enumerate(zip(lengths, counts, strict=True))
        ]
        self.backend = ReferenceAttention(block_size)
        self.backend.allocate([self.shape], self.num_blocks, dtype=torch.float32, device=CPU)
        for pool in self.backend._caches[0]:
            pool.fill_(float("nan"))  # what a former owner may have left
        self.batch = StepBatch(
            max_tokens=sum(lengths),
            max_seqs=len(lengths),
            max_model_len=max(lengths),
            block_size=block_size,
            device=CPU,
        )

    def run(self, chunks: Seq[Seq[tuple[int, int]]], params: AttentionParams) -> list[torch.Tensor]:
        """Runs steps, each of (sequence, tokens) in the order given; each sequence's outputs put together."""
        outputs: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        for step in chunks:
            scheduled = [Scheduled(self.sequences[index], count) for index, count in step if count]
            spans = [
                slice(s.sequence.num_computed_tokens, s.sequence.num_computed_tokens + s.num_query_tokens)
                for s in scheduled
            ]
            self.batch.fill(scheduled)
            self.backend.prepare(self.batch)
            flat = [
                torch.cat([tensors[s.sequence.key][span] for s, span in zip(scheduled, spans, strict=True)])
                for tensors in (self.query, self.key, self.value)
            ]
            output = self.backend.attend(0, *flat, params)
            for item, part in zip(scheduled, output.split([s.num_query_tokens for s in scheduled]), strict=True):
                outputs[item.sequence.key].append(part)
                item.sequence.num_computed_tokens += item.num_query_tokens
        return [torch.cat(parts) for parts in outputs]

    def dense(self, params: AttentionParams) -> list[torch.Tensor]:
        return [dense(q, k, v, params) for q, k, v in zip(self.query, self.key, self.value, strict=True)]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Attention in float64, written as the definition: a loop over heads, no mask but a slice for each query."""
    group = query.shape[1] // key.shape[1]
    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for head in range(query.shape[1]):
        q, k, v = (t.double() for t in (query[:, head], key[:, head // group], value[:, head // group]))
        for i in range(len(q)):
            first = 0 if params.window is None else max(0, i - params.window + 1)
            scores = k[first : i + 1] @ q[i] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            if params.sinks is not None:
                scores = torch.cat([scores, params.sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: i + 1 - first]
            output[i, head] = weights @ v[first : i + 1]
    return output


def prefill_then_decode(lengths: Seq[int], decoded: int) -> list[list[tuple[int, int]]]:
    """All but the last `decoded` tokens of each sequence at once, then those one by one."""
    firsts = [max(0, n - decoded) for n in lengths]
    decodes = [[(i, 1) for i, n in enumerate(lengths) if firsts[i] + step < n] for step in range(decoded)]
    return [list(enumerate(firsts)), *decodes]


def assert_close(found: Seq[torch.Tensor], expected: Seq[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs).abs().max()) < 1e-4


PLAIN = AttentionParams(scale=DIM**-0.5)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128, 256])
def test_paged_equals_dense_at_the_edges_of_blocks(block_size: int) -> None:
    case = Case(LENGTHS, block_size)
    assert_close(case.run(prefill_then_decode(LENGTHS, 2), PLAIN), case.dense(PLAIN))


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(scale=0.3, window=1),
        AttentionParams(scale=0.3, window=7),
        AttentionParams(scale=0.3, window=1000),
        AttentionParams(scale=0.3, softcap=2.0),
        AttentionParams(scale=0.3, window=5, softcap=2.0),
        AttentionParams(scale=0.3, sinks=torch.linspace(-2, 3, HEADS)),
        AttentionParams(scale=0.3, window=5, sinks=torch.linspace(-2, 3, HEADS)),
    ],
    ids=["window 1", "window 7", "window 1000", "softcap", "softcap and window", "sinks", "sinks and window"],
)
def test_windows_softcaps_and_sinks(params: AttentionParams) -> None:
    lengths = (1, 5, 8, 9, 40)
    case = Case(lengths, 8)
    assert_close(case.run(prefill_then_decode(lengths, 3), params), case.dense(params))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_may_be_of_another_size_than_keys(softcap: float | None) -> None:
    params = AttentionParams(scale=0.2, softcap=softcap)
    case = Case((3, 20, 33), 8, dim=24, value_dim=16)
    found = case.run(prefill_then_decode((3, 20, 33), 2), params)
    assert [part.shape for part in found] == [(n, HEADS, 16) for n in (3, 20, 33)]
    assert_close(found, case.dense(params))


def test_one_query_head_a_kv_head() -> None:
    case = Case((2, 17), 8, heads=KV_HEADS)
    assert_close(case.run(prefill_then_decode((2, 17), 2), PLAIN), case.dense(PLAIN))


@given(data=st.data(), block_size=st.sampled_from([1, 3, 8, 32]), window=st.sampled_from([None, 4]))
def test_any_mix_of_chunks_equals_dense(data: st.DataObject, block_size: int, window: int | None) -> None:
    """Prefill chunks and decodes of several sequences in one step, in any order and of any size."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    left, steps = list(lengths), []
    while any(left):
        step = [(i, data.draw(st.integers(0, left[i]))) for i in data.draw(st.permutations(range(len(lengths))))]
        if not any(count for _, count in step):
            step = [(i, left[i]) for i in range(len(lengths))]
        for i, count in step:
            left[i] -= count
        steps.append(step)
    params = AttentionParams(scale=0.25, window=window)
    case = Case(lengths, block_size)
    assert_close(case.run(steps, params), case.dense(params))


def test_strided_queries_are_read_as_they_are() -> None:
    """Query, key and value cut out of one fused projection."""
    case = Case((6,), 4, heads=KV_HEADS)
    fused = torch.cat([case.query[0], case.key[0], case.value[0]], dim=-1)
    case.query[0], case.key[0], case.value[0] = fused.split(DIM, dim=-1)
    assert not case.query[0].is_contiguous()
    case.batch.fill([Scheduled(case.sequences[0], 6)])
    case.backend.prepare(case.batch)
    output = case.backend.attend(0, case.query[0], case.key[0], case.value[0], PLAIN)
    assert_close([output], case.dense(PLAIN))


def test_a_neighbours_broken_numbers_stay_its_own() -> None:
    """One sequence's keys and values are NaN and infinite; the others are computed as if it were not there."""
    lengths = (9, 10, 30)
    case = Case(lengths, 8)
    clean = case.dense(PLAIN)
    case.key[1][:] = float("nan")
    case.value[1][:] = float("inf")
    found = case.run(prefill_then_decode(lengths, 3), PLAIN)
    assert_close([found[0], found[2]], [clean[0], clean[2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers_lose_no_more_than_their_own_rounding(dtype: torch.dtype) -> None:
    case = Case((1, 17, 60), 16)
    for tensors in (case.query, case.key, case.value):
        tensors[:] = [t.to(dtype) for t in tensors]
    case.backend.allocate([case.shape], case.num_blocks, dtype=dtype, device=CPU)
    found = case.run(prefill_then_decode((1, 17, 60), 2), PLAIN)
    for ours, theirs in zip(found, case.dense(PLAIN), strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).abs().max()) < 4 * torch.finfo(dtype).eps


def test_bytes_of_a_block() -> None:
    layers = [LayerShape(3, 64, 64)] * 30
    assert block_bytes(layers, 1, torch.bfloat16) == 23_040
    assert block_bytes([LayerShape(2, 24, 16)], 16, torch.float32) == 16 * 2 * (24 + 16) * 4
