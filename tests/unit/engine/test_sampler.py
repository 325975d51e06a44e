"""The sampler: its hash, its distribution, its masks, and that a row's choice is its own."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferq.engine import sampler
from inferq.engine.sequence import SequenceSampling

U64 = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def params(**fields: object) -> SequenceSampling:
    return SequenceSampling(max_tokens=1, **fields)


def sample(rows: torch.Tensor, requests: Seq[SequenceSampling], positions: Seq[int]) -> list[int]:
    return sampler.sample(rows, requests, positions).tolist()


def logits(rows: int, vocabulary: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def mix(x: int) -> int:
    """SplitMix64's finalizer, in Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % U64
    return x ^ (x >> 31)


def noise(seed: int, position: int, token: int) -> float:
    """The Gumbel noise of one token, in float64."""
    key = mix((mix(seed) + position * GOLDEN) % U64)
    bits = mix((key + (token + 1) * GOLDEN) % U64)
    u = min(((bits >> 11) | 1) * 2.0**-53, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def kept(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The tokens that top-k and top-p leave, with their probabilities: one by one, in float64."""
    values = [float(v) / temperature for v in row.double()]
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if 0 < top_k < len(values):
        order = [token for token in order if values[token] >= values[order[top_k - 1]]]
    weights = {token: math.exp(values[token] - values[order[0]]) for token in order}
    total, cumulative, last = sum(weights.values()), 0.0, len(order) - 1
    for place, token in enumerate(order):
        cumulative += weights[token]
        if cumulative >= top_p * total:
            last = place
            break
    left = {t: w for t, w in weights.items() if values[t] >= values[order[last]]}
    return {token: weight / sum(left.values()) for token, weight in left.items()}


def test_the_noise_is_the_same_as_in_plain_integers() -> None:
    cases = [(0, 0), (1, 5), (2**63 - 1, 8191), (123456789, 2**20)]
    tokens = torch.tensor([0, 1, 319, 49151, 200_000])
    parameters = sampler._Parameters.of([params(seed=s) for s, _ in cases], [p for _, p in cases], torch.device("cpu"))
    found = sampler.gumbel_noise(parameters.keys, tokens)
    for row, (seed, position) in enumerate(cases):
        for column, token in enumerate(tokens.tolist()):
            assert float(found[row, column]) == pytest.approx(noise(seed, position, token), rel=1e-5, abs=1e-6)


def test_the_noise_is_finite_and_gumbel() -> None:
    parameters = sampler._Parameters.of([params(seed=3)], [17], torch.device("cpu"))
    found = sampler.gumbel_noise(parameters.keys, torch.arange(2**20)).double()
    assert bool(found.isfinite().all())
    assert float(found.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(found.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9}],
    ids=str,
)
def test_the_distribution_is_the_exact_one(fields: dict[str, float]) -> None:
    """Chi-square over seeds and positions; the inputs are fixed, so that it never fails by chance."""
    draws, row = 20_000, logits(1, 16, seed=1, scale=1.5)
    requests = [params(**fields, seed=index // 4) for index in range(draws)]
    tokens = sample(row.expand(draws, -1), requests, [index % 4 for index in range(draws)])
    exact = kept(row[0], fields.get("temperature", 1.0), int(fields.get("top_k", 0)), fields.get("top_p", 1.0))
    counts = [tokens.count(token) for token in exact]
    assert sum(counts) == draws
    expected = [probability * draws for probability in exact.values()]
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    freedom = len(exact) - 1
    # The 99.9% point, by Wilson and Hilferty.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([7, 50, 2500]),
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 2, 40, 1024, 1500, 10**7]),
    top_p=st.floats(0.01, 1),
    rounded=st.booleans(),
)
def test_masks_equal_the_plain_ones(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float, rounded: bool
) -> None:
    """Also with many ties, and with more kept than the shortlist has."""
    values = logits(1, vocabulary, seed=seed)
    values = values.round() if rounded else values
    request = params(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    (token,) = sample(values, [request], [3])
    exact = kept(values[0], temperature, top_k, top_p)
    near = kept(values[0], temperature, top_k, min(1.0, top_p + 1e-6))
    assert token in near
    if set(near) == set(exact):
        best = max(exact, key=lambda t: float(values[0, t]) / temperature + noise(seed, 3, t))
        score = {t: float(values[0, t]) / temperature + noise(seed, 3, t) for t in (best, token)}
        assert score[best] - score[token] < 1e-3


@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([0, 2, 20, 400, 10**7]),
    top_p=st.floats(0.01, 0.999),
    rounded=st.booleans(),
)
def test_exactly_the_tokens_of_the_plain_masks_are_kept(
    seed: int, temperature: float, top_k: int, top_p: float, rounded: bool
) -> None:
    values = logits(1, 300, seed=seed)
    values = values.round() if rounded else values
    request = params(temperature=temperature, top_k=top_k, top_p=top_p)
    if len({len(kept(values[0], temperature, top_k, p)) for p in (top_p - 1e-5, top_p, min(1, top_p + 1e-5))}) > 1:
        return  # so near to an edge that float32 may fall on either side
    parameters = sampler._Parameters.of([request], [0], values.device)
    scaled = sampler._scale(values, parameters)
    floor = sampler._floor(scaled.sort(descending=True).values, scaled, parameters)
    assert set((scaled >= floor)[0].nonzero()[:, 0].tolist()) == set(kept(values[0], temperature, top_k, top_p))


@pytest.mark.parametrize("values", [torch.zeros(5000), torch.linspace(0, 1e-3, 5000)], ids=["ties", "slope"])
def test_more_kept_than_the_shortlist_has(values: torch.Tensor) -> None:
    """Nearly all of a flat distribution is kept, so that a choice from all of it is nearly always the same."""
    rows, positions = values.expand(100, -1), range(100)
    cut = sample(rows, [params(top_p=0.98, seed=seed) for seed in range(100)], positions)
    uncut = sample(rows, [params(seed=seed) for seed in range(100)], positions)
    assert sum(a == b for a, b in zip(cut, uncut, strict=True)) >= 90


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_a_constant_added_to_all_logits_changes_nothing(fields: dict[str, float]) -> None:
    rows = (logits(50, 400, seed=8) * 64).round() / 64  # exact also after the addition
    requests = [params(**fields, seed=seed) for seed in range(50)]
    assert sample(rows + 1024, requests, range(50)) == sample(rows, requests, range(50))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows, rng = logits(40, 3000, seed=5), random.Random(0)
    rows[:3] = rows[:3].round()  # ties
    choices = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_p": 0.9999, "temperature": 4.0},
        {"top_k": 64, "top_p": 0.95},
        {"top_k": 2000},
        {"top_k": 9999999},
    ]
    requests = [params(**rng.choice(choices), seed=rng.randrange(2**40)) for _ in range(40)]
    positions = [rng.randrange(5000) for _ in range(40)]
    alone = [sample(rows[i : i + 1], [requests[i]], [positions[i]])[0] for i in range(40)]
    assert sample(rows, requests, positions) == alone
    order = rng.sample(range(40), 40)
    assert sample(rows[order], [requests[i] for i in order], [positions[i] for i in order]) == [alone[i] for i in order]


def test_the_position_changes_the_choice() -> None:
    row = torch.zeros(1, 1000)
    assert len({sample(row, [params(seed=1)], [position])[0] for position in range(50)}) > 40


@pytest.mark.parametrize("temperature", [1e-40, 1e-10, 1e-5, 1.1e-5, 1e-2])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_tiny_temperatures_are_greedy(temperature: float, extra: dict[str, float]) -> None:
    rows = torch.tensor([[-80.0, 3.0, 80.0, 79.0], [1.0, 2.0, 0.0, float("-inf")]])
    for seed in range(20):
        assert sample(rows, [params(temperature=temperature, seed=seed, **extra)] * 2, [1, 2]) == [2, 1]


def test_a_huge_temperature_is_near_uniform() -> None:
    rows = logits(2000, 4, seed=2, scale=50)
    tokens = sample(rows, [params(temperature=1e9, seed=seed) for seed in range(2000)], [0] * 2000)
    assert all(tokens.count(token) > 400 for token in range(4))


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_what_leaves_one_token_is_greedy(fields: dict[str, float]) -> None:
    rows = logits(8, 500, seed=4)
    assert sample(rows, [params(**fields, seed=s) for s in range(8)], [0] * 8) == rows.argmax(-1).tolist()


def test_bfloat16_logits_are_compared_as_they_are() -> None:
    rows = logits(8, 500, seed=6).bfloat16()
    assert sample(rows, [params(temperature=0.0)] * 8, [0] * 8) == rows.float().argmax(-1).tolist()


def test_ties_with_the_last_of_top_k_beyond_the_shortlist_count_in_top_p() -> None:
    """One token of weight 1, and 4,999 that tie: top-k 3 keeps them all, and top-p goes by the sum of them all."""
    row = torch.full((1, 5000), -5.0)
    row[0, 17] = 0.0
    requests = [params(top_k=3, top_p=0.12, seed=seed) for seed in range(60)]
    chosen = sample(row.expand(60, -1), requests, [0] * 60)
    # The first one's share is 1 in 34.7, less than top_p: the others are kept too, and are likelier all together.
    assert len(set(chosen)) > 40
