"""The sampling kernels against the engine's sampler: the same tokens, whatever a row asks for and whatever is in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.pairs import covering
from support.rounding import nan_in_new_memory

from inferq.cuda import sampling
from inferq.cuda.gumbel import gumbel_noise, noise_key
from inferq.engine import sampler
from inferq.engine.sequence import GREEDY_BELOW, SequenceSampling

MAX_POSITION = 2**31
NAN, INFINITY = float("nan"), float("inf")

TEMPERATURES = [0.0, 1e-6, 1e-5, 1e-4, 0.7, 1.0, 100.0]
TOP_KS = [0, 1, 2, 40, 700, 1024, 1300, 1500, 9000]
TOP_PS = [0.0, 1e-12, 0.5, 0.9, 0.9999, 1.0]


#: Takes seconds: of all these in this folder a small run takes a few.
LONG = pytest.mark.slow(family="interpreted", share=0.15)


@pytest.fixture(autouse=True)
def no_lucky_memory() -> Iterator[None]:
    with nan_in_new_memory():
        yield


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of a row, at a small part of the cost."""
    monkeypatch.setattr(sampling, "PART", 1024)


def params(**fields: Any) -> SequenceSampling:
    return SequenceSampling(max_tokens=1, **fields)


def run(logits: torch.Tensor, samplings: Sequence[SequenceSampling], positions: Sequence[int]) -> list[int]:
    """The kernels' tokens."""
    chosen = torch.full((len(logits),), -7)
    sampling.sample(
        logits,
        torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
        torch.tensor([s.top_k for s in samplings], dtype=torch.int64),
        torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
        torch.tensor([s.seed for s in samplings], dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        chosen,
    )
    return chosen.tolist()


def check(logits: torch.Tensor, samplings: Sequence[SequenceSampling], positions: Sequence[int]) -> None:
    expected = sampler.sample(logits.float(), samplings, positions).tolist()
    chosen = run(logits, samplings, positions)
    wrong = [(row, c, e, samplings[row]) for row, (c, e) in enumerate(zip(chosen, expected, strict=True)) if c != e]
    assert not wrong, f"{len(wrong)} of {len(chosen)} rows, among them {wrong[:3]}"


def random_rows(fields: Sequence[dict[str, Any]], seed: int = 0) -> tuple[list[SequenceSampling], list[int]]:
    """Samplings with these fields in any order, each with a seed and a position."""
    rng = random.Random(seed)
    samplings = [params(seed=rng.randrange(-(2**63), 2**63), **f) for f in fields]
    rng.shuffle(samplings)
    return samplings, [rng.randrange(MAX_POSITION + 1) for _ in samplings]


def normal(rows: int, vocabulary: int, *, scale: float = 3.0, mean: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale + mean


def levels(rows: int, vocabulary: int, *values: float) -> torch.Tensor:
    """Logits of which many are equal."""
    picks = torch.randint(len(values), (rows, vocabulary), generator=torch.Generator().manual_seed(1))
    return torch.tensor(values)[picks]


Kinds = dict[str, Callable[[int, int], torch.Tensor]]

UNTIED: Kinds = {
    "usual": lambda rows, vocabulary: normal(rows, vocabulary),
    "all negative": lambda rows, vocabulary: normal(rows, vocabulary, mean=-50),
    "all positive": lambda rows, vocabulary: normal(rows, vocabulary, mean=50),
    "flat": lambda rows, vocabulary: normal(rows, vocabulary, scale=1e-3),
    "peaked": lambda rows, vocabulary: normal(rows, vocabulary, scale=40),
}
TIED: Kinds = {
    "all equal": lambda rows, vocabulary: levels(rows, vocabulary, -1.5),
    "all zero, of either sign": lambda rows, vocabulary: levels(rows, vocabulary, 0.0, -0.0),
    "two levels": lambda rows, vocabulary: levels(rows, vocabulary, 2.0, -1.0),
    "a level below, equal once scaled": lambda rows, vocabulary: levels(rows, vocabulary, 0.0, -1e-38, -1.0),
    "steps": lambda rows, vocabulary: normal(rows, vocabulary).mul(4).round().div(4),
    "mostly -inf": lambda rows, vocabulary: normal(rows, vocabulary).where(
        levels(rows, vocabulary, 1, 0, 0) > 0, -INFINITY
    ),
    "few levels and -inf": lambda rows, vocabulary: levels(rows, vocabulary, -3.0, 1.0, 4.0, -INFINITY),
    "one is not -inf": lambda rows, vocabulary: torch.full((rows, vocabulary), -INFINITY).index_fill(
        1, torch.tensor([vocabulary - 2]), -5.0
    ),
    "very large": lambda rows, vocabulary: levels(rows, vocabulary, 3e38, -3e38, 2.9e38, 1.0),
    "tiny": lambda rows, vocabulary: levels(rows, vocabulary, 1e-45, 0.0, -1e-45, 1e-40),
}


def batch(
    kinds: Kinds, vocabulary: int, part: int, parts: int
) -> tuple[torch.Tensor, list[SequenceSampling], list[int]]:
    """One of some batches in which, together, any two values that a row can have occur in one row."""
    cases = covering(kind=list(kinds), top_k=TOP_KS, temperature=TEMPERATURES, top_p=TOP_PS)
    random.Random(5).shuffle(cases)
    cases = cases[part::parts]
    logits = torch.stack([kinds[case.pop("kind")](len(cases), vocabulary)[row] for row, case in enumerate(cases)])
    return logits, *random_rows(cases)


def sampled(parts: int) -> list[Any]:
    """The first part always runs."""
    return [pytest.param(part, marks=[pytest.mark.slow] if part else []) for part in range(parts)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("part", sampled(5))
def test_the_tokens_are_the_samplers(part: int) -> None:
    check(*batch(UNTIED, 1500, part, 5))


# A vocabulary within the sampler's shortlist: beyond it, it leaves ties of top-k out of what top-p is a share of.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("part", sampled(5))
def test_the_tokens_are_the_samplers_where_logits_are_equal_or_extreme(part: int) -> None:
    check(*batch(TIED, 901, part, 5))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("part", sampled(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_tokens_of_half_precision_logits_are_the_samplers_of_the_same_numbers(
    dtype: torch.dtype, part: int
) -> None:
    logits, samplings, positions = batch(UNTIED, 901, part, 3)
    check(logits.to(dtype), samplings, positions)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_top_k_may_reach_beyond_the_tokens_that_are_possible(dtype: torch.dtype) -> None:
    rows = [params(top_k=k, top_p=p, seed=5) for k in (100, 700) for p in (0.9, 1.0)]
    check(TIED["mostly -inf"](len(rows), 901).to(dtype), rows, range(len(rows)))


@pytest.mark.usefixtures("small_parts")
def test_ties_across_parts_are_kept() -> None:
    rows = [params(top_k=1300, top_p=p, seed=seed) for seed in range(2) for p in (0.5, 0.97, 1.0)]
    check(levels(len(rows), 1500, 3.0, 0.0, -1.0), rows, range(len(rows)))


@LONG
def test_a_part_that_is_not_read_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most parts are below the floor after a few steps. Hot, so that the tokens around the floor are chosen too."""
    monkeypatch.setattr(sampling, "PART", 32)
    fields = [{"top_k": k, "top_p": p} for k, p in ((3, 1.0), (8, 1.0), (20, 1.0), (0, 0.04), (0, 0.1), (20, 0.5))]
    rows = [params(temperature=9.0, seed=seed, **f) for f in fields for seed in range(2)]
    check(normal(len(rows), 150, mean=1.0), rows, range(len(rows)))


@pytest.mark.usefixtures("small_parts")
def test_every_seed_and_every_position_has_its_own_noise() -> None:
    seeds = [-(2**63), -(2**32), -1, 0, 1, 2**31, 2**63 - 1]
    rows = [(seed, position) for seed in seeds for position in (0, 1, MAX_POSITION)]
    check(normal(1, 1500, scale=0.1).expand(len(rows), -1), [params(seed=s) for s, _ in rows], [p for _, p in rows])
    assert len(set(run(torch.zeros(len(rows), 1500), [params(seed=s) for s, _ in rows], [p for _, p in rows]))) > 15


@triton.jit
def noise_kernel(seed: tl.tensor, position: tl.tensor, noise: tl.tensor, COUNT: tl.constexpr) -> None:
    tokens = tl.arange(0, COUNT)
    tl.store(noise + tokens, gumbel_noise(noise_key(tl.load(seed), tl.load(position)), tokens))


def test_the_noise_is_as_exact_as_float32_can_be() -> None:
    """Of the largest noise too, which is that of the smallest u: of a million, one is about 1e-6."""
    count = 2**20
    seed, position, noise = torch.tensor([-5]), torch.tensor([MAX_POSITION]), torch.empty(count)
    noise_kernel[(1,)](seed, position, noise, COUNT=count)
    keys = sampler._mix(sampler._mix(seed) + position * sampler._GOLDEN)
    bits = sampler._mix(keys + (torch.arange(count) + 1) * sampler._GOLDEN)
    u = (((bits >> 11) & (2**53 - 1)) | 1).float().double().mul(2.0**-53).clamp(max=1 - 2.0**-24)
    assert u.min() < 1e-5 and u.max() > 1 - 1e-5
    exact = -(-(-u).log1p()).log()
    torch.testing.assert_close(noise.double(), exact, rtol=3e-7, atol=6e-7)


@LONG
@pytest.mark.usefixtures("small_parts")
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, samplings, positions = batch(UNTIED, 1100, 0, 15)
    together = run(logits, samplings, positions)
    alone = [
        run(logits[row : row + 1], samplings[row : row + 1], positions[row : row + 1]) for row in range(len(logits))
    ]
    assert together == [token for (token,) in alone]
    assert run(logits.flip(0), samplings[::-1], positions[::-1]) == together[::-1]
    poisoned = torch.full((2 * len(logits), 1100), NAN)
    poisoned[::2] = logits
    neighbour = params(top_k=3, top_p=0.5)
    mixed = run(
        poisoned, [s for own in samplings for s in (own, neighbour)], [p for own in positions for p in (own, 0)]
    )
    assert mixed[::2] == together


def kept(probabilities: Sequence[float], **fields: Any) -> set[int]:
    """The tokens that some seeds choose."""
    rows = [params(seed=seed, **fields) for seed in range(12)]
    return set(run(torch.tensor(probabilities).log().expand(12, -1), rows, [1] * 12))


@LONG
@pytest.mark.usefixtures("small_parts")
def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    probabilities = [0.1, 0.4, 0.2, 0.3]
    # Of the two that top-k leaves, one has 4/7; of all four it has 0.4.
    assert kept(probabilities, top_k=2, top_p=0.5) == {1}
    assert kept(probabilities, top_p=0.5) == {1, 3}
    # Temperature 4 makes it 0.54 of the two.
    assert kept(probabilities, top_k=2, top_p=0.55) == {1}
    assert kept(probabilities, top_k=2, top_p=0.55, temperature=4.0) == {1, 3}


@LONG
@pytest.mark.usefixtures("small_parts")
def test_ties_with_the_last_one_kept_are_kept() -> None:
    probabilities = [0.1, 0.2, 0.2, 0.1, 0.2, 0.2]
    assert kept(probabilities, top_k=2) == {1, 2, 4, 5}
    assert kept(probabilities, top_p=0.3) == {1, 2, 4, 5}
    assert kept(probabilities, top_p=0.0) == {1, 2, 4, 5}
    assert kept(probabilities, top_k=1) == {1}
    assert kept(probabilities, top_k=5) == set(range(6))
    # Half of what top-k leaves with its ties, 0.8, takes all of these again.
    assert kept(probabilities, top_k=2, top_p=0.5) == {1, 2, 4, 5}


def test_it_is_greedy_below_the_engines_temperature_and_the_first_of_a_tie_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "PART", 128)
    logits = torch.zeros(6, 300)
    logits[:, [70, 71, 140, 299]] = 1.0
    just_greedy = torch.tensor(GREEDY_BELOW).nextafter(torch.tensor(0.0)).item()
    greedy = [params(temperature=t, seed=s) for s, t in enumerate((0.0, 1e-6, just_greedy))]
    by_top_k = [params(temperature=t, top_k=1, top_p=p) for t, p in ((1.0, 1.0), (100.0, 0.5), (1e-5, 1.0))]
    assert run(logits, greedy + by_top_k, range(6)) == [70] * 6
    warmest = [params(temperature=GREEDY_BELOW, seed=seed) for seed in range(16)]
    assert set(run(logits[:1].expand(16, -1), warmest, [0] * 16)) == {70, 71, 140, 299}


@pytest.mark.usefixtures("small_parts")
def test_logits_that_are_not_numbers_end_in_some_token() -> None:
    fields = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"top_k": 1}]
    rows = [params(seed=seed, **f) for seed, f in enumerate(fields)]
    some = normal(6, 1100)
    some[:, 7::3] = NAN
    never = [torch.full((6, 1100), NAN), torch.full((6, 1100), -INFINITY)]
    infinite = some.index_fill(1, torch.tensor([1030, 1050]), INFINITY)
    chosen = run(some, rows, range(6))
    assert all(token < 7 or token % 3 != 1 for token in chosen) and max(chosen) < 1100
    assert [run(logits, rows, range(6)) for logits in never] == [[0] * 6] * 2
    assert run(infinite, rows, range(6)) == [1030] * 6


@pytest.mark.usefixtures("small_parts")
def test_rows_may_lie_anywhere() -> None:
    logits, samplings, positions = batch(UNTIED, 1101, 1, 12)
    rows = len(logits)
    gaps = torch.full((rows, 2, 1200), NAN)
    gaps[:, 1, 37:1138] = logits
    check(gaps[:, 1, 37:1138], samplings, positions)
    check(logits[:1].expand(rows, -1), samplings, positions)


@pytest.mark.usefixtures("small_parts")
def test_only_the_tokens_are_written() -> None:
    logits, samplings, positions = batch(UNTIED, 600, 2, 30)
    given = logits.clone()
    chosen = torch.full((len(logits) + 2,), -7)
    columns = [
        torch.tensor([getattr(s, name) for s in samplings]) for name in ("temperature", "top_k", "top_p", "seed")
    ]
    temperature, top_k, top_p, seeds = columns
    sampling.sample(logits, temperature.float(), top_k, top_p.double(), seeds, torch.tensor(positions), chosen[1:-1])
    assert torch.equal(logits, given)
    assert chosen.tolist() == [-7, *sampler.sample(logits, samplings, positions).tolist(), -7]


def test_no_rows_are_no_launch() -> None:
    assert run(torch.empty(0, 100), [], []) == []


def test_logits_that_are_not_dense_are_refused() -> None:
    with pytest.raises(ValueError, match="logits"):
        run(torch.zeros(100, 2).t(), [params()] * 2, [0, 0])


def test_the_sums_of_lanes_are_those_of_a_whole_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card a part is weighed lane after lane, which the interpreter otherwise does at once."""
    monkeypatch.setattr(sampling, "PART", 1024)
    monkeypatch.setattr(sampling, "_lanes", lambda: 256)
    check(*batch(UNTIED, 1500, 3, 12))


@pytest.mark.parametrize("vocabulary", [8193, pytest.param(49152, marks=LONG), pytest.param(151_937, marks=LONG)])
def test_the_parts_that_a_card_gets(vocabulary: int) -> None:
    rows = [params(seed=1), params(seed=3, top_k=50, top_p=0.95, temperature=0.7)]
    check(normal(len(rows), vocabulary), rows, [2**20 + row for row in range(len(rows))])
