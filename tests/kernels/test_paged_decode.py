"""Paged decode against attention in float64, around the edges of tiles, blocks, windows and splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import paged_cases
from support.paged_cases import GRID, TOLERANCE, Sequences, nan
from support.paged_oracle import attention
from support.pairs import as_parameters, covering
from support.rounding import huge_tensor

from inferq.cuda.paged_decode import DecodeWorkspace, decode_config, num_splits, paged_decode

# A score far above the cap: its hyperbolic tangent is 1, by way of an infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

PLAIN = paged_cases.PLAIN | {"splits": 4}
SPECIAL = paged_cases.SPECIAL | {"splits": 4, "window": 70}
CASES = covering(**GRID | {"window": [None, 1, 17, 64, 65, 10_000]}, splits=[1, 2, 8])


class Case(Sequences):
    """Sequences of `lengths`, with a query for each."""

    def __init__(self, case: dict[str, Any], lengths: list[int]) -> None:
        super().__init__(case, lengths)
        self.lengths, self.splits = lengths, case["splits"]
        self.query = self.draw(len(lengths))
        self.query[[length == 0 for length in lengths]] = float("nan")

    def decode(self, rows: list[int] | None = None) -> torch.Tensor:
        """[rows, heads, value_dim], of all sequences or of those in `rows`."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        workspace = DecodeWorkspace.allocate(
            len(rows) + 1, self.heads + 1, 2 * self.splits, self.value_dim + 1, torch.device("cpu")
        )
        workspace.partial.fill_(float("nan"))
        workspace.lse.fill_(float("nan"))
        return self.written(
            len(rows),
            lambda output: paged_decode(
                self.placed(self.query[rows]),
                self.pages.key_cache,
                self.pages.value_cache,
                self.pages.tables[rows],
                self.pages.seq_lens[rows],
                output,
                splits=self.splits,
                workspace=None if self.splits == 1 else workspace,
                **self.params,
            ),
        )

    def expected(self) -> torch.Tensor:
        rows = torch.zeros(len(self.lengths), self.heads, self.value_dim, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            if length:
                rows[row] = self.attention(self.query[row : row + 1], row)[0]
        return rows


def edges(case: dict[str, Any]) -> list[int]:
    """Lengths around the edges of tiles and blocks, up to some tiles for each split, with a row of padding."""
    (key_dim, value_dim), block = case["dims"], case["block"]
    config = decode_config(key_dim=key_dim, value_dim=value_dim, dtype=case["dtype"], group=case["group"], block=block)
    tile = config.tile
    around = sorted({1, tile - 1, tile, tile + 1, block, block + 1, 5 * tile + 3})
    return [*around[:2], 0, *around[2:]]


@pytest.mark.parametrize("case", as_parameters([PLAIN, SPECIAL, SPECIAL | {"splits": 1}], CASES))
def test_it_is_attention(case: dict[str, Any]) -> None:
    sequences = Case(case, edges(case))
    output = sequences.decode()
    torch.testing.assert_close(output.double(), sequences.expected(), rtol=0, atol=TOLERANCE[case["dtype"]])
    assert not output[sequences.lengths.index(0)].any()


@pytest.mark.parametrize("splits", [1, 4])
def test_neighbours_change_no_bit(splits: int) -> None:
    """Nor do the rows that they are in, nor how many they are."""
    sequences = Case(SPECIAL | {"splits": splits, "dtype": torch.float16, "strided": False}, [133, 0, 300, 64])
    together = sequences.decode()
    for rows in ([0], [2], [3, 2, 1], [1, 1, 1, 0, 3]):
        assert torch.equal(sequences.decode(rows), together[rows])


@pytest.mark.parametrize("splits", [1, 4])
def test_more_heads_of_a_group_than_a_program_has_rows(splits: int) -> None:
    case = PLAIN | {"dims": (16, 16), "group": 71, "sinks": True, "splits": splits}
    sequences = Case(case, [40])
    torch.testing.assert_close(sequences.decode().double(), sequences.expected(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("splits", [1, 4])
def test_sinks_at_their_extremes(splits: int) -> None:
    """A sink of minus infinity is none; a very large one takes all of the weight."""
    sequences = Case(PLAIN | {"dims": (64, 64), "group": 2, "splits": splits}, [0, 100])
    without = sequences.decode()
    sequences.params["sinks"] = torch.tensor([-float("inf"), 1e4, -float("inf"), 1e4], dtype=torch.float16)
    output = sequences.decode()
    assert torch.equal(output[:, 0::2], without[:, 0::2])
    assert not output[:, 1::2].any()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_scores_far_from_zero(softcap: float | None) -> None:
    """A softmax of very different scores is finite, and so is a hyperbolic tangent."""
    sequences = Case(SPECIAL | {"softcap": softcap, "sinks": False}, [100, 5])
    sequences.params["scale"] = 1000.0
    torch.testing.assert_close(sequences.decode().double(), sequences.expected(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", [16, 64], ids=["a part of a tile", "a tile"])
@pytest.mark.parametrize("far_apart", ["blocks", "kv heads", "tokens"])
def test_caches_far_apart(far_apart: str, block: int, tmp_path: Path) -> None:
    """Their number and the distance fit into 32 bits, and their product does not."""
    distance, dim = 2**30, 16
    shape = {"blocks": (3, 1, block, dim), "kv heads": (1, 3, block, dim), "tokens": (1, 1, block, dim)}[far_apart]
    strides = {
        "blocks": (distance, block * dim, dim, 1),
        "kv heads": (dim, distance, dim, 1),
        "tokens": (distance, distance, 4 * distance // block, 1),
    }[far_apart]
    cache = huge_tensor(tmp_path, 4 * distance, torch.float16).as_strided(shape, strides)
    keys = torch.randn(block, shape[1], dim).half()
    cache[-1] = keys.transpose(0, 1)
    query = torch.randn(1, shape[1], dim).half()
    output = nan(1, shape[1], dim, dtype=torch.float16)
    tables, lengths = torch.tensor([[shape[0] - 1]], dtype=torch.int32), torch.tensor([block], dtype=torch.int32)
    plain: dict[str, Any] = {"scale": 0.25, "window": None, "softcap": None, "sinks": None}
    paged_decode(query, cache, cache, tables, lengths, output, splits=1, workspace=None, **plain)
    torch.testing.assert_close(output.double(), attention(query, keys, keys, scale=0.25), rtol=0, atol=2e-3)


def test_splits_follow_rows_and_limits() -> None:
    def splits(rows: int, kv_heads: int = 8, max_context: int = 4096) -> int:
        return num_splits(rows, kv_heads, multiprocessors=132, max_context=max_context)

    assert [splits(rows) for rows in (1, 4, 8, 16, 32, 64, 66, 67, 256)] == [32, 32, 16, 8, 4, 2, 1, 1, 1]
    assert [splits(rows, max_context=8193) for rows in (1, 16, 64, 256)] == [32, 8, 4, 4]
    assert splits(64, max_context=8192) == 2


def test_what_it_refuses() -> None:
    sequences = Case(PLAIN, [5])
    pages = sequences.pages
    arguments = [sequences.query, pages.key_cache, pages.value_cache, pages.tables, pages.seq_lens]
    output = torch.empty(1, sequences.heads, 128, dtype=torch.float16)
    for name, index in (("query", 0), ("key_cache", 1), ("value_cache", 2)):
        gaps = list(arguments)
        gaps[index] = gaps[index].repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(ValueError, match=f"last dimension of {name}"):
            paged_decode(*gaps, output, splits=1, workspace=None, **sequences.params)
    small = DecodeWorkspace.allocate(1, sequences.heads, 2, 128, torch.device("cpu"))
    for workspace in (None, small):
        with pytest.raises(ValueError, match="larger workspace"):
            paged_decode(*arguments, output, splits=4, workspace=workspace, **sequences.params)
