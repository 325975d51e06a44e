"""One step's work as flat arrays: what the model runner, the attention backend and the sampler read.

The arrays are allocated once, at their largest, and filled anew for each step, so that a step allocates nothing and a
captured graph finds them where they were. Knows sequences and block ids; knows no model and no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch

from .sequence import Scheduled, SequenceSampling
from .step_buffers import Shapes, StepBuffers

#: What a row of padding is sampled with: greedily, from logits that nobody looks at.
_PADDING: Final = SequenceSampling(max_tokens=1, temperature=0.0)


class StepBatch:
    """The scheduled tokens of all sequences behind one another, in the order of `fill`'s argument.

    For each token: `input_ids`, `positions` in its sequence, and `slot_mapping`, its place in the cache (block id
    times block size, plus the offset in the block; -1 in a row of padding); all int64 [tokens].

    For each sequence: `seq_lens` int32 [sequences], its tokens up to the end of this step (0 in a row of padding);
    `query_starts` int32 [sequences + 1], the sums of its predecessors' tokens in this step, and of all; `block_tables`
    int32 [sequences, blocks], of which a row's first ceil(seq_len / block_size) entries mean something.

    `new_blocks` int64 [blocks] are those that get their first token in this step: what a former owner left in them must
    not be read.

    For each token that is to be sampled: `sample_rows` int64, the token after which it comes; `sample_positions` int64,
    where in its sequence it will stand; `temperature` float32 (0 is greedy), `top_k` int64 (0 is off), `top_p` float64
    (1 is off), `seeds` int64; and `sampled` int64, where the sampler puts it. All are [samples].
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.device = device
        self.num_tokens = 0
        self.num_seqs = 0
        self.num_samples = 0
        self._num_new_blocks = 0
        #: Sequences at the front that decode: rows of padding do, too.
        self.num_decodes = 0
        #: How each token is to be sampled, for a sampler that runs on the host.
        self.samplings: list[SequenceSampling] = []
        tokens, seqs = (max_tokens,), (max_seqs,)
        shapes: Shapes = {
            "input_ids": (tokens, torch.int64),
            "positions": (tokens, torch.int64),
            "slot_mapping": (tokens, torch.int64),
            "seq_lens": (seqs, torch.int32),
            "query_starts": ((max_seqs + 1,), torch.int32),
            "sample_rows": (seqs, torch.int64),
            "sample_positions": (seqs, torch.int64),
            "temperature": (seqs, torch.float32),
            "top_k": (seqs, torch.int64),
            "top_p": (seqs, torch.float64),
            "seeds": (seqs, torch.int64),
            "pending_tokens": (seqs, torch.int64),
            "pending_rows": (seqs, torch.int64),
            "new_blocks": ((max_tokens // block_size + max_seqs,), torch.int64),
            # Last: the rows that are not used need not be copied.
            "block_tables": ((max_seqs, -(-max_model_len // block_size)), torch.int32),
        }
        self._buffers = StepBuffers(shapes, device, separate=device.type != "cpu")
        self._sampled = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._rows_sampled: dict[int, int] = {}  #: by key, of the step before

    def fill(self, scheduled: Seq[Scheduled], rows: int | None = None) -> None:
        """Makes this the batch of `scheduled`, of whom each decodes where it is to be padded to `rows` sequences.

        Their block tables already cover the tokens to be computed. A token that is pending is the one that the step
        before this one samples.

        It does not wait for the device, which may still be reading what it was filled with before this time. What it
        was filled with before that must have been read: whoever fills it waits for the end of the step before the last.
        """
        array = self._buffers.next_arrays()
        self.samplings = []
        self.num_tokens = self.num_seqs = self.num_samples = self.num_decodes = self._num_new_blocks = 0
        array["query_starts"][0] = 0
        pending: list[tuple[int, int]] = []
        rows_sampled: dict[int, int] = {}
        for item in scheduled:
            end = self.num_tokens + item.num_query_tokens
            if self._fill_tokens(array, self.num_tokens, end, item):
                pending.append((end - 1, self._rows_sampled[item.sequence.key]))
            if item.samples:
                rows_sampled[item.sequence.key] = self.num_samples
                self._add_sample(array, item.sequence.sampling, end - 1, item.start + item.num_query_tokens)
            self._end_row(array, item.num_query_tokens, item.start + item.num_query_tokens, decodes=item.decodes)
        for _ in range(len(scheduled), rows or 0):
            self._fill_padding(array)
        self._rows_sampled = rows_sampled
        if pending:
            array["pending_tokens"][: len(pending)], array["pending_rows"][: len(pending)] = zip(*pending, strict=True)
        self._buffers.send(self.num_seqs)
        if pending:
            # On the device, behind the step that samples them.
            tokens, rows_of = (self._buffers.device[n][: len(pending)] for n in ("pending_tokens", "pending_rows"))
            self._buffers.device["input_ids"].index_copy_(0, tokens, self._sampled.index_select(0, rows_of))

    def _fill_tokens(self, array: Mapping[str, np.ndarray], begin: int, end: int, item: Scheduled) -> bool:
        """True if the last of these tokens is not known yet."""
        sequence, size = item.sequence, self.block_size
        start = item.start
        stop = start + item.num_query_tokens
        known = sequence.token_ids[start:stop]
        positions = np.arange(start, stop, dtype=np.int64)
        table = np.asarray(sequence.block_table[: -(-stop // size)], dtype=np.int32)
        array["input_ids"][begin : begin + len(known)] = known
        array["positions"][begin:end] = positions
        array["slot_mapping"][begin:end] = table[positions // size].astype(np.int64) * size + positions % size
        array["block_tables"][self.num_seqs, : len(table)] = table
        new_blocks = table[-(-start // size) :]
        count = self._num_new_blocks + len(new_blocks)
        array["new_blocks"][self._num_new_blocks : count] = new_blocks
        self._num_new_blocks = count
        return len(known) < item.num_query_tokens

    def _fill_padding(self, array: Mapping[str, np.ndarray]) -> None:
        token = self.num_tokens
        array["input_ids"][token] = array["positions"][token] = 0
        array["slot_mapping"][token] = -1
        array["block_tables"][self.num_seqs] = 0
        self._add_sample(array, _PADDING, token, 0)
        self._end_row(array, 1, 0, decodes=True)

    def _end_row(self, array: Mapping[str, np.ndarray], query_len: int, seq_len: int, *, decodes: bool) -> None:
        row = self.num_seqs
        if decodes and self.num_decodes == row:
            self.num_decodes += 1
        self.num_tokens += query_len
        self.num_seqs += 1
        array["seq_lens"][row] = seq_len
        array["query_starts"][row + 1] = self.num_tokens

    def _add_sample(
        self, array: Mapping[str, np.ndarray], sampling: SequenceSampling, token: int, position: int
    ) -> None:
        sample = self.num_samples
        array["sample_rows"][sample] = token
        array["sample_positions"][sample] = position
        array["temperature"][sample] = 0 if sampling.is_greedy else sampling.temperature
        array["top_k"][sample] = sampling.top_k
        array["top_p"][sample] = sampling.top_p
        array["seeds"][sample] = sampling.seed
        self.samplings.append(sampling)
        self.num_samples += 1

    def _of_tokens(self, name: str) -> torch.Tensor:
        return self._buffers.device[name][: self.num_tokens]

    def _of_seqs(self, name: str) -> torch.Tensor:
        return self._buffers.device[name][: self.num_seqs]

    def _of_samples(self, name: str) -> torch.Tensor:
        return self._buffers.device[name][: self.num_samples]

    @property
    def input_ids(self) -> torch.Tensor:
        return self._of_tokens("input_ids")

    @property
    def positions(self) -> torch.Tensor:
        return self._of_tokens("positions")

    @property
    def slot_mapping(self) -> torch.Tensor:
        return self._of_tokens("slot_mapping")

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._of_seqs("seq_lens")

    @property
    def query_starts(self) -> torch.Tensor:
        return self._buffers.device["query_starts"][: self.num_seqs + 1]

    @property
    def block_tables(self) -> torch.Tensor:
        return self._of_seqs("block_tables")

    @property
    def new_blocks(self) -> torch.Tensor:
        return self._buffers.device["new_blocks"][: self._num_new_blocks]

    @property
    def sample_rows(self) -> torch.Tensor:
        return self._of_samples("sample_rows")

    @property
    def sample_positions(self) -> torch.Tensor:
        return self._of_samples("sample_positions")

    @property
    def temperature(self) -> torch.Tensor:
        return self._of_samples("temperature")

    @property
    def top_k(self) -> torch.Tensor:
        return self._of_samples("top_k")

    @property
    def top_p(self) -> torch.Tensor:
        return self._of_samples("top_p")

    @property
    def seeds(self) -> torch.Tensor:
        return self._of_samples("seeds")

    @property
    def sampled(self) -> torch.Tensor:
        return self._sampled[: self.num_samples]

    @property
    def host_sample_positions(self) -> list[int]:
        return [int(position) for position in self._buffers.array["sample_positions"][: self.num_samples]]

    @property
    def host_lens(self) -> list[tuple[int, int]]:
        """(query length, sequence length) of each sequence, without waiting for the device."""
        starts = self._buffers.array["query_starts"][: self.num_seqs + 1]
        seq_lens = self._buffers.array["seq_lens"][: self.num_seqs]
        return list(zip(np.diff(starts).tolist(), seq_lens.tolist(), strict=True))
