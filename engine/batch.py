"""One step's work as flat arrays: what the model runner and the attention backend read.

The arrays are allocated once, at their largest, and filled anew for each step, so that a step allocates nothing and
a captured graph would find them where they were. Knows sequences and block ids; knows no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch

from .sequence import Scheduled

_LONG: Final = ("input_ids", "positions", "slot_mapping")
_SEQ: Final = ("query_lens", "seq_lens")


class StepBatch:
    """The scheduled tokens of all sequences behind one another, in the order of `fill`'s argument.

    For each token: `input_ids`, `positions` in its sequence, and `slot_mapping`, its place in the cache (block id
    times block size, plus the offset in the block); all int64 [tokens]. For each sequence: `query_lens`, its tokens in
    this step, and `seq_lens`, its tokens up to the end of this step; int32 [sequences]; `block_tables` int32
    [sequences, blocks], of which a row's first ceil(seq_len / block_size) entries mean something. `sample_rows` int64
    [samples] are the tokens after which a token is to be sampled.
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.num_tokens = 0
        self.num_seqs = 0
        self.num_samples = 0
        #: Blocks that get their first token in this step: what a former owner left in them must not be read.
        self.new_blocks: list[int] = []
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **{name: ((max_tokens,), torch.int64) for name in _LONG},
            **{name: ((max_seqs,), torch.int32) for name in _SEQ},
            "sample_rows": ((max_seqs,), torch.int64),
            "block_tables": ((max_seqs, -(-max_model_len // block_size)), torch.int32),
        }
        self._host = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        self._array = {name: tensor.numpy() for name, tensor in self._host.items()}
        self._device = {name: t.to(device) if device.type != "cpu" else t for name, t in self._host.items()}

    def fill(self, scheduled: Seq[Scheduled]) -> None:
        """Makes this the batch of `scheduled`. Their block tables already cover the tokens to be computed."""
        self.new_blocks = []
        token, samples = 0, 0
        for row, item in enumerate(scheduled):
            end = token + item.num_query_tokens
            self._fill_row(row, token, end, item)
            if item.samples:
                self._array["sample_rows"][samples] = end - 1
                samples += 1
            token = end
        self.num_tokens, self.num_seqs, self.num_samples = token, len(scheduled), samples
        self._copy_to_device()

    def _fill_row(self, row: int, begin: int, end: int, item: Scheduled) -> None:
        sequence, size, array = item.sequence, self.block_size, self._array
        start = sequence.num_computed_tokens
        stop = start + item.num_query_tokens
        positions = np.arange(start, stop, dtype=np.int64)
        table = np.asarray(sequence.block_table[: -(-stop // size)], dtype=np.int32)
        array["input_ids"][begin:end] = sequence.token_ids[start:stop]
        array["positions"][begin:end] = positions
        array["slot_mapping"][begin:end] = table[positions // size].astype(np.int64) * size + positions % size
        array["query_lens"][row] = item.num_query_tokens
        array["seq_lens"][row] = stop
        array["block_tables"][row, : len(table)] = table
        first_new = -(-start // size)
        self.new_blocks += table[first_new:].tolist()

    def _copy_to_device(self) -> None:
        if self.device.type == "cpu":
            return
        for name, count in self._counts().items():
            # Not asynchronous: the next step fills the same host arrays.
            self._device[name][:count].copy_(self._host[name][:count])

    def _counts(self) -> dict[str, int]:
        return {
            **dict.fromkeys(_LONG, self.num_tokens),
            **dict.fromkeys(_SEQ, self.num_seqs),
            "sample_rows": self.num_samples,
            "block_tables": self.num_seqs,
        }

    @property
    def input_ids(self) -> torch.Tensor:
        return self._device["input_ids"][: self.num_tokens]

    @property
    def positions(self) -> torch.Tensor:
        return self._device["positions"][: self.num_tokens]

    @property
    def slot_mapping(self) -> torch.Tensor:
        return self._device["slot_mapping"][: self.num_tokens]

    @property
    def query_lens(self) -> torch.Tensor:
        return self._device["query_lens"][: self.num_seqs]

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._device["seq_lens"][: self.num_seqs]

    @property
    def block_tables(self) -> torch.Tensor:
        return self._device["block_tables"][: self.num_seqs]

    @property
    def sample_rows(self) -> torch.Tensor:
        return self._device["sample_rows"][: self.num_samples]

    @property
    def host_lens(self) -> list[tuple[int, int]]:
        """(query length, sequence length) of each sequence, without waiting for the device."""
        rows = slice(0, self.num_seqs)
        return list(zip(self._array["query_lens"][rows].tolist(), self._array["seq_lens"][rows].tolist(), strict=True))
