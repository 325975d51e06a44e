"""Paged prefill against attention in float64: whole prompts, chunks of them, and prompts with a cached prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_cases import GRID, PLAIN, SPECIAL, TOLERANCE, Sequences, nan
from support.paged_oracle import attention, make_pages
from support.pairs import as_parameters, covering
from support.rounding import huge_tensor

from inferq.cuda.paged_prefill import paged_prefill, prefill_config

# A score far above the cap: its hyperbolic tangent is 1, by way of an infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class Case(Sequences):
    """Sequences of (new tokens, all tokens), with a query for each new token."""

    def __init__(self, case: dict[str, Any], lengths: list[tuple[int, int]]) -> None:
        super().__init__(case, [total for _, total in lengths])
        self.lengths = lengths
        self.queries = [self.draw(new) for new, _ in lengths]

    def prefill(self, rows: list[int] | None = None) -> list[torch.Tensor]:
        """[new, heads, value_dim] of each sequence, or of those in `rows`; NaN where nothing was written."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        queries = [self.queries[row] for row in rows]
        counts = [len(query) for query in queries]
        padding = nan(5, self.heads, self.key_dim, dtype=self.dtype)
        *written, after = self.written(
            sum(counts) + len(padding),
            lambda output: paged_prefill(
                self.placed(torch.cat([*queries, padding])),
                self.pages.key_cache,
                self.pages.value_cache,
                self.pages.tables[rows],
                torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                self.pages.seq_lens[rows],
                output,
                max_query_len=max(counts) + 70,
                **self.params,
            ),
        ).split([*counts, len(padding)])
        assert after.isnan().all(), "wrote for rows of no sequence"
        return written

    def check(self) -> None:
        for row, output in enumerate(self.prefill()):
            if self.lengths[row][1] == 0:
                assert output.isnan().all(), "wrote for a sequence of length 0"
            else:
                expected, tolerance = self.attention(self.queries[row], row), TOLERANCE[self.dtype]
                torch.testing.assert_close(
                    output.double(), expected, rtol=0, atol=tolerance, msg=str(self.lengths[row])
                )


def edges(case: dict[str, Any]) -> list[tuple[int, int]]:
    """Around the edges of tiles, blocks and programs: prompts, chunks, a decoding sequence, and what has no tokens."""
    (key_dim, value_dim), block = case["dims"], case["block"]
    config = prefill_config(key_dim=key_dim, value_dim=value_dim, dtype=case["dtype"], block=block)
    tile, tokens = config.tile, config.rows // case["group"]  # of a program, and a part of one where that is not even
    return [
        (1, 1),
        (tokens + 1, tokens + 1),
        (0, 0),
        (5, 0),
        (tile, tile),
        (2, tile + 1),
        (0, tile),
        (1, 2 * tile),
        (tokens, 2 * tile + tokens - 1),
        (3, block + 1),
    ]


@pytest.mark.parametrize("case", as_parameters([PLAIN, SPECIAL, PLAIN | {"block": 16, "window": 5}], covering(**GRID)))
def test_it_is_attention(case: dict[str, Any]) -> None:
    Case(case, edges(case)).check()


def test_neighbours_change_no_bit() -> None:
    """Nor do the rows that they are in, nor how many they are."""
    case = SPECIAL | {"dtype": torch.float16, "strided": False}
    sequences = Case(case, [(40, 40), (0, 0), (17, 90), (1, 64)])
    together = sequences.prefill()
    for rows in ([0], [2], [3, 2, 1], [2, 2, 0]):
        for row, output in zip(rows, sequences.prefill(rows), strict=True):
            assert torch.equal(output, together[row])


def test_chunks_are_the_whole_prompt() -> None:
    """Each chunk attends to those before it, as its tokens do when the prompt is computed at once."""
    whole = Case(PLAIN | {"dims": (64, 64)}, [(100, 100)])
    (expected,) = whole.prefill()
    for first, end in ((0, 33), (33, 34), (34, 100)):
        chunk = Case(PLAIN | {"dims": (64, 64)}, [(100, 100)])
        chunk.queries = [whole.queries[0][first:end]]
        chunk.pages.seq_lens[0] = end
        (output,) = chunk.prefill()
        torch.testing.assert_close(output, expected[first:end], rtol=0, atol=2e-3)


def test_more_heads_of_a_group_than_a_program_has_rows() -> None:
    Case(PLAIN | {"dims": (16, 16), "group": 71, "sinks": True}, [(3, 40)]).check()


def test_sinks_at_their_extremes() -> None:
    """A sink of minus infinity is none; a very large one takes all of the weight."""
    sequences = Case(PLAIN | {"dims": (64, 64), "group": 2}, [(20, 50)])
    (without,) = sequences.prefill()
    sequences.params["sinks"] = torch.tensor([-float("inf"), 1e4, -float("inf"), 1e4], dtype=torch.float16)
    (output,) = sequences.prefill()
    assert torch.equal(output[:, 0::2], without[:, 0::2])
    assert not output[:, 1::2].any()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_scores_far_from_zero(softcap: float | None) -> None:
    """A softmax of very different scores is finite, and so is a hyperbolic tangent."""
    sequences = Case(SPECIAL | {"softcap": softcap, "sinks": False}, [(7, 50)])
    sequences.params["scale"] = 1000.0
    (output,) = sequences.prefill()
    torch.testing.assert_close(output.double(), sequences.attention(sequences.queries[0], 0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("far_apart", ["tokens", "heads"])
def test_queries_and_outputs_far_apart(far_apart: str, tmp_path: Path) -> None:
    """Their number and the distance fit into 32 bits, and their product does not."""
    distance, shape = 2**30, (3, 2, 16)
    strides = (distance, 16, 1) if far_apart == "tokens" else (16, 2 * distance, 1)
    generator = torch.Generator().manual_seed(1)
    pages = make_pages([3], kv_heads=1, key_dim=16, value_dim=16, block=16, dtype=torch.float16, generator=generator)
    query = torch.randn(shape, generator=generator).half()
    spread = huge_tensor(tmp_path, 2 * distance + 64, torch.float16).as_strided(shape, strides)
    spread.copy_(query)
    paged_prefill(
        spread,
        pages.key_cache,
        pages.value_cache,
        pages.tables,
        torch.tensor([0, 3], dtype=torch.int32),
        pages.seq_lens,
        spread,
        max_query_len=3,
        scale=0.25,
        window=None,
        softcap=None,
        sinks=None,
    )
    expected = attention(query, pages.keys[0], pages.values[0], scale=0.25)
    torch.testing.assert_close(spread.double(), expected, rtol=0, atol=2e-3)


def test_what_it_refuses() -> None:
    sequences = Case(PLAIN, [(2, 5)])
    pages = sequences.pages
    arguments = [sequences.queries[0], pages.key_cache, pages.value_cache, pages.tables]
    starts, output = torch.tensor([0, 2], dtype=torch.int32), torch.empty(2, sequences.heads, 128, dtype=torch.float16)
    for name, index in (("query", 0), ("key_cache", 1), ("value_cache", 2)):
        gaps = list(arguments)
        gaps[index] = gaps[index].repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(ValueError, match=f"last dimension of {name}"):
            paged_prefill(*gaps, starts, pages.seq_lens, output, max_query_len=2, **sequences.params)
