"""The attention of the largest step over the longest contexts that there can be, for the memory that it takes.

Of one layer of each kind: what a layer has taken is free for the next one.
"""

from __future__ import annotations

import torch

from inferq.engine.batch import StepBatch
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

from .choice import Workload
from .interface import AttentionBackend


@torch.inference_mode()
def attend_to_longest(backend: AttentionBackend, workload: Workload, max_tokens: int) -> None:
    """All sequences but one decode at the end of the context, and one computes there what `max_tokens` leave.

    Its chunk is not the whole context, for which backends have shorter ways. Every page is the same one: there is no
    pool yet. Queries, keys and values are made here too, although the model's step has them: shorter contexts leave
    room for more queries at once. Leaves `backend` with a cache of one block.
    """
    context, size = workload.max_context, backend.block_size
    batch = StepBatch(
        max_tokens=max_tokens,
        max_seqs=workload.max_seqs,
        max_model_len=context,
        block_size=size,
        device=workload.device,
    )
    # With whole pages alone, and with a part of a page behind them.
    for length in {context, max(1, context - 1)}:
        batch.fill(_largest_step(length, -(-length // size), workload.max_seqs, max_tokens))
        for layer in {layer.kind: layer for layer in workload.layers}.values():
            backend.allocate([layer.shape], 1, dtype=workload.dtype, device=workload.device)
            backend.prepare(batch)
            zeros = layer.zeros(batch.num_tokens, dtype=workload.dtype, device=workload.device)
            backend.attend(0, **zeros, params=layer.params)


def _largest_step(length: int, blocks: int, rows: int, max_tokens: int) -> list[Scheduled]:
    token_ids, table, sampling = [0] * length, [0] * blocks, SequenceSampling(max_tokens=1)
    counts = [1] * (rows - 1) + [max(1, min(max_tokens - rows + 1, length - 1))]
    sequences = [
        Sequence(key, token_ids, length, sampling, num_computed_tokens=length - count, block_table=table)
        for key, count in enumerate(counts)
    ]
    return [Scheduled(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
