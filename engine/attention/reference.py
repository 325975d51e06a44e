"""Paged attention in plain torch, for any device: what the fast kernels are measured against.

It gathers each sequence's pages into a dense tensor and attends there, one sequence at a time while prefilling and
many at once while decoding. What that takes beside the cache is bounded, however many sequences and queries there are,
by what one query of the longest sequence takes, or by two limits below if these are more. Scores, softmax and sums are
in float32, or in what `scaled_dot_product_attention` uses, which is no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from inferq.engine.batch import StepBatch

from .interface import AttentionParams, KVCache, LayerShape, make_cache

#: Cached tokens, padding included, that are gathered at once from several sequences.
GATHERED_TOKENS: Final = 2**17
#: A query and a cached token make a pair, which has a score for each head: so many pairs of a prompt at once.
PAIRS: Final = 2**22


class ReferenceAttention:
    """An AttentionBackend. `block_size` is in tokens."""

    name = "torch"
    kernels = f"torch {torch.__version__}"
    graph_safe = False
    copies_contexts = True

    def __init__(self, block_size: int = 32) -> None:
        self.block_size = block_size
        self._caches: list[KVCache] = []
        self._slots = torch.empty(0, dtype=torch.int64)
        self._new_blocks: torch.Tensor | None = None
        self._groups: list[_Group] = []

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._caches = []  # before the new pools are made: both at once might not fit
        self._caches = [make_cache(shape, num_blocks, self.block_size, dtype=dtype, device=device) for shape in layers]

    def prepare(self, batch: StepBatch) -> None:
        self._slots = batch.slot_mapping
        self._new_blocks = batch.new_blocks if len(batch.new_blocks) else None
        self._groups = _group(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        key_cache, value_cache = self._caches[layer]
        self._write(key_cache, key)
        self._write(value_cache, value)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in self._groups:
            _attend(group, query, group.gather(key_cache), group.gather(value_cache), params, output)
        return output

    def _write(self, cache: torch.Tensor, entries: torch.Tensor) -> None:
        if self._new_blocks is not None:
            # A mask does not stop NaN: 0 * NaN is NaN. So nothing of a block's former owner stays in it.
            cache.index_fill_(0, self._new_blocks, 0)
        cache[self._slots // self.block_size, :, self._slots % self.block_size] = entries


@dataclass(slots=True)
class _Group:
    """B sequences whose pages are gathered at once."""

    parts: list[_Part]
    tables: torch.Tensor  #: int64 [B, blocks], padded with blocks of the same sequence
    block_size: int
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """The pages of each sequence behind one another: [B, kv_heads, blocks * block_size, dim]."""
        heads, dim = cache.shape[1], cache.shape[3]
        if heads not in self._rows:
            each_head = torch.arange(heads, device=cache.device).unsqueeze(1)
            self._rows[heads] = (self.tables.unsqueeze(1) * heads + each_head).flatten()
        pages = cache.view(-1, self.block_size * dim).index_select(0, self._rows[heads])
        return pages.view(len(self.tables), heads, -1, dim)


@dataclass(slots=True)
class _Part:
    """n queries of each sequence of a group, attended as one dense batch of B sequences and L cached tokens."""

    token_rows: torch.Tensor  #: int64 [B * n], where their tokens are in the step
    positions: torch.Tensor  #: int64 [B, n], of the queries
    length: int  #: L, as far as the last of them sees
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [B, heads, n, dim]."""
        rows = query.index_select(0, self.token_rows)
        return rows.view(*self.positions.shape, *query.shape[1:]).transpose(1, 2)

    def is_plain_causal(self, window: int | None) -> bool:
        """True for a prompt that is computed at once: no mask needs to be made."""
        whole = self.positions.shape == (1, self.length)
        return whole and (window is None or window >= self.length)

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [B, 1, n, L], True where a query sees a cached token."""
        if (mask := self._masks.get(window)) is None:
            cached = torch.arange(self.length, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)
            mask = cached <= queries if window is None else (cached <= queries) & (cached > queries - window)
            mask = mask.unsqueeze(1)
            # The same for all layers of one window. Those of a prompt would be large together.
            if self.positions.shape[1] == 1:
                self._masks[window] = mask
        return mask


class _Member(NamedTuple):
    """A sequence's part in a group; it sorts by bucket, then by sequence."""

    bucket: int
    row: int
    first_token: int
    query_len: int
    seq_len: int
    num_blocks: int


def _group(batch: StepBatch) -> list[_Group]:
    """Prefills one by one; decodes by the power of two that their block count lies under, to bound the padding.

    Of these as many at once as GATHERED_TOKENS allows.
    """
    members: list[_Member] = []
    first = 0
    for row, (query_len, seq_len) in enumerate(batch.host_lens):
        blocks = -(-seq_len // batch.block_size)
        bucket = -row - 1 if query_len > 1 else (blocks - 1).bit_length()
        members.append(_Member(bucket, row, first, query_len, seq_len, blocks))
        first += query_len
    members.sort()
    groups: list[_Group] = []
    for bucket, same in groupby(members, key=lambda member: member.bucket):
        alike = list(same)
        size = 1 if bucket < 0 else max(1, GATHERED_TOKENS // (batch.block_size << bucket))
        groups += [_dense(batch, alike[begin : begin + size]) for begin in range(0, len(alike), size)]
    return groups


def _dense(batch: StepBatch, members: list[_Member]) -> _Group:
    _, rows, firsts, query_lens, seq_lens, counts = (list(column) for column in zip(*members, strict=True))
    steps = torch.arange(query_lens[0])
    token_rows = (torch.tensor(firsts).unsqueeze(1) + steps).flatten().to(batch.device)
    tables = batch.block_tables[rows, : max(counts)].long()
    padding = torch.arange(max(counts)) >= torch.tensor(counts).unsqueeze(1)
    # Not with a neighbour's block, whose numbers might not be finite.
    tables = torch.where(padding.to(batch.device), tables[:, :1], tables)
    positions = batch.positions[token_rows].view(len(rows), -1)
    return _Group(_parts(token_rows, positions, max(seq_lens)), tables, batch.block_size)


def _parts(token_rows: torch.Tensor, positions: torch.Tensor, length: int) -> list[_Part]:
    """Decodes as a whole, and a prompt cut into parts of PAIRS at most, as if it came in chunks."""
    num_queries = positions.shape[1]
    if num_queries == 1:
        return [_Part(token_rows, positions, length)]
    size = max(1, PAIRS // length)
    ends = [min(begin + size, num_queries) for begin in range(0, num_queries, size)]
    return [
        _Part(token_rows[begin:end], positions[:, begin:end], length - num_queries + end)
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def _attend(
    group: _Group,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    output: torch.Tensor,
) -> None:
    """The group's tokens of `query` to its gathered keys and values, into `output`."""
    attend = _attend_fused if params.softcap is None and params.sinks is None else _attend_explicit
    for part in group.parts:
        attended = attend(part, part.queries(query), keys[:, :, : part.length], values[:, :, : part.length], params)
        output.index_copy_(0, part.token_rows, attended.transpose(1, 2).flatten(0, 1).to(output.dtype))
        del attended  # before the next one is made


def _attend_fused(
    part: _Part, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """query [B, heads, n, dim], key and value [B, kv_heads, L, dim] -> [B, heads, n, value_dim]."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if part.is_plain_causal(params.window):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=params.scale, enable_gqa=heads != kv_heads
        )
    mask = part.mask(params.window)
    if query.shape[2] > 1:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=params.scale, enable_gqa=heads != kv_heads
        )
    # While decoding, the heads of a group are the queries of their KV head: each key is read once.
    grouped = query.view(len(query), kv_heads, heads // kv_heads, -1)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=params.scale)
    return attended.view(len(query), heads, 1, -1)


def _attend_explicit(
    part: _Part, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """The same with softcap and sinks, which `scaled_dot_product_attention` does not know."""
    batch, heads, queries, dim = query.shape
    grouped = query.float().reshape(batch, key.shape[1], heads // key.shape[1], queries, dim)
    scores = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * params.scale
    weights = _softmax(scores, part.mask(params.window).unsqueeze(2), params)
    return (weights @ value.float().unsqueeze(2)).flatten(1, 2)


def _softmax(scores: torch.Tensor, mask: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """scores [B, kv_heads, heads of each, n, L], mask [B, 1, 1, n, L]; each query sees at least itself."""
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is None:
        return scores.softmax(-1)
    sinks = params.sinks.float().view(scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
