"""What the reference attention takes beside its cache: a bounded amount, which the largest step shows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.live_bytes import peak_bytes

from inferq.engine.attention import AttentionParams, LayerProbe, LayerShape, reference
from inferq.engine.attention.choice import Workload
from inferq.engine.attention.longest import attend_to_longest
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

CPU = torch.device("cpu")
BLOCK = 4
CONTEXT = 64
ROWS = 5
TOKENS = 24
SHAPE = LayerShape(2, 8, 8)
PLAIN = AttentionParams(0.3)
LAYERS = {
    "plain": LayerProbe(SHAPE, 4, PLAIN),
    "softcap": LayerProbe(SHAPE, 4, AttentionParams(0.3, softcap=5.0)),
    "sinks and window": LayerProbe(SHAPE, 4, AttentionParams(0.3, window=9, sinks=torch.ones(4))),
}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small steps meet them: two of the longest contexts, and 5 queries of one."""
    monkeypatch.setattr(reference, "GATHERED_TOKENS", 2 * CONTEXT)
    monkeypatch.setattr(reference, "PAIRS", 5 * CONTEXT)


def step_bytes(layer: LayerProbe, lens: Seq[tuple[int, int]]) -> int:
    """Of the attention of a step of these (query length, sequence length), beside what it is given."""
    backend = ReferenceAttention(BLOCK)

    @torch.inference_mode()
    def run() -> None:
        counts = [-(-length // BLOCK) for _, length in lens]
        batch = StepBatch(max_tokens=TOKENS, max_seqs=ROWS, max_model_len=CONTEXT, block_size=BLOCK, device=CPU)
        batch.fill(
            [
                Scheduled(
                    Sequence(
                        key,
                        [0] * length,
                        length,
                        SequenceSampling(max_tokens=1),
                        num_computed_tokens=length - queries,
                        block_table=list(range(count)),
                    ),
                    queries,
                )
                for key, ((queries, length), count) in enumerate(zip(lens, counts, strict=True))
            ]
        )
        backend.prepare(batch)
        backend.attend(0, **zeros, params=layer.params)

    zeros = layer.zeros(sum(queries for queries, _ in lens), dtype=torch.float32, device=CPU)
    backend.allocate([layer.shape], CONTEXT // BLOCK, dtype=torch.float32, device=CPU)
    return peak_bytes(run)


@cache
def longest_bytes(kind: str, *, context: int = CONTEXT) -> int:
    workload = Workload([LAYERS[kind]], max_seqs=ROWS, max_context=context, dtype=torch.float32, device=CPU)
    return peak_bytes(lambda: attend_to_longest(ReferenceAttention(BLOCK), workload, TOKENS))


@pytest.mark.parametrize("kind", LAYERS)
@given(data=st.data())
def test_no_step_takes_more_than_the_largest_one(kind: str, data: st.DataObject) -> None:
    lens: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, ROWS))):
        left = TOKENS - sum(queries for queries, _ in lens)
        length = data.draw(st.integers(1, CONTEXT))
        if left:
            lens.append((data.draw(st.integers(1, min(left, length))), length))
    assert step_bytes(LAYERS[kind], lens) <= longest_bytes(kind)


@pytest.mark.parametrize("kind", LAYERS)
def test_more_sequences_and_more_queries_are_not_gathered_at_once(kind: str) -> None:
    """What grows with a step is what each of its tokens and sequences has, and no copy of a context."""
    context_bytes = CONTEXT * SHAPE.token_bytes(torch.float32)
    few, many = ([(1, CONTEXT)] * rows for rows in (2, ROWS))
    assert step_bytes(LAYERS[kind], many) - step_bytes(LAYERS[kind], few) < context_bytes
    scores = 4 * CONTEXT * 4
    short, long = ([(queries, CONTEXT)] for queries in (5, TOKENS))
    assert step_bytes(LAYERS[kind], long) - step_bytes(LAYERS[kind], short) < (TOKENS - 5) * scores / 2


def test_one_context_over_the_limits_is_copied_whole_and_shows() -> None:
    short, long = (longest_bytes("plain", context=contexts * CONTEXT) for contexts in (2, 4))
    assert long - short >= 2 * CONTEXT * SHAPE.token_bytes(torch.float32)
