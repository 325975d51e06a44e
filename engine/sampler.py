"""Chooses the next token of each sequence from its logits.

Randomness is a function of the request's seed, the token's position in its sequence and the token's index in the
vocabulary, and of nothing else: neither neighbours in the batch, nor the order of steps, nor a resume elsewhere change
a choice. Knows nothing of models and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import torch

from .sequence import SequenceSampling

#: top-k and top-p are looked for among this many most likely tokens first, and in the whole vocabulary if need be.
SHORTLIST: Final = 1024
#: Logits worked on at once on a CPU, so that what is between two operations stays in its cache.
_CPU_CHUNK: Final = 2**18
#: The same elsewhere, where it bounds the memory that is taken.
_CHUNK: Final = 2**22
#: The odd number nearest to 2**64 divided by the golden ratio, as a signed integer.
_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64


class _Kind(Enum):
    GREEDY = auto()
    PLAIN = auto()  #: from the whole vocabulary
    SHORT = auto()  #: top-k or top-p, likely within the shortlist
    LONG = auto()  #: top-k beyond the shortlist


def sample(logits: torch.Tensor, samplings: Seq[SequenceSampling], positions: Seq[int]) -> torch.Tensor:
    """The chosen token id of each row of `logits` [rows, vocabulary]: int64 [rows].

    `positions` are where in its sequence each chosen token will stand. The order of the steps is temperature, top-k,
    top-p. Tokens that tie with the last one kept are kept, but top-k 1 is greedy: of a tie, the first. The choice is
    the argmax of logits / temperature plus Gumbel noise (Gumbel-max).
    """
    rows_of: dict[_Kind, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows_of.setdefault(_kind(sampling, logits.shape[1]), []).append(row)
    if list(rows_of) == [_Kind.GREEDY]:
        return logits.float().argmax(-1)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for kind, rows in rows_of.items():
        limit = _CPU_CHUNK if logits.device.type == "cpu" else _CHUNK
        size = max(1, limit // logits.shape[1])
        for chunk in (rows[begin : begin + size] for begin in range(0, len(rows), size)):
            parameters = _Parameters.of(
                [samplings[row] for row in chunk], [positions[row] for row in chunk], logits.device
            )
            chosen[chunk] = _CHOOSE[kind](logits[chunk].float(), parameters)
    return chosen


def _kind(sampling: SequenceSampling, vocabulary: int) -> _Kind:
    if sampling.is_greedy:
        return _Kind.GREEDY
    if 0 < sampling.top_k < vocabulary:
        return _Kind.SHORT if sampling.top_k <= SHORTLIST else _Kind.LONG
    return _Kind.PLAIN if sampling.top_p >= 1 else _Kind.SHORT


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of some rows, as tensors [rows, 1]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, samplings: Seq[SequenceSampling], positions: Seq[int], device: torch.device) -> _Parameters:
        def column(values: Seq[int] | Seq[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        seeds = column([s.seed for s in samplings], torch.int64)
        return cls(
            temperature=column([s.temperature for s in samplings], torch.float32),
            top_k=column([s.top_k for s in samplings], torch.int64),
            top_p=column([s.top_p for s in samplings], torch.float64),
            keys=_mix(_mix(seeds) + column(positions, torch.int64) * _GOLDEN),
        )

    def of_rows(self, rows: torch.Tensor) -> _Parameters:
        return _Parameters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.keys[rows])


def _greedy(logits: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    return logits.argmax(-1)


def _plain(logits: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    indices = torch.arange(logits.shape[1], device=logits.device)
    return (_scale(logits, parameters) + gumbel_noise(parameters.keys, indices)).argmax(-1)


def _short(logits: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    """From the shortlist; for a row that keeps more than that, from the whole vocabulary."""
    count = min(SHORTLIST, logits.shape[1])
    scaled = _scale(logits, parameters)
    values, indices = scaled.topk(count)
    floor = _floor(values, scaled, parameters)
    chosen = _choose(values, indices, floor, parameters)
    # Tokens that tie with the shortlist's last may be outside of it: some that are kept, or some of those that top-k
    # keeps, by whose sum top-p goes.
    limited = torch.where(parameters.top_k > 0, _kth(values, parameters), float("inf"))
    beyond = (values[:, -1:] >= torch.minimum(floor, limited)).squeeze(1)
    if count < logits.shape[1] and bool(beyond.any()):
        chosen[beyond] = _long(logits[beyond], parameters.of_rows(beyond))
    return chosen


def _long(logits: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    scaled = _scale(logits, parameters)
    values, indices = scaled.sort(descending=True, stable=True)
    return _choose(values, indices, _floor(values, scaled, parameters), parameters)


_CHOOSE: Final[dict[_Kind, Callable[[torch.Tensor, _Parameters], torch.Tensor]]] = {
    _Kind.GREEDY: _greedy,
    _Kind.PLAIN: _plain,
    _Kind.SHORT: _short,
    _Kind.LONG: _long,
}


def _scale(logits: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    """Logits over temperature, shifted so that the largest is 0: a tiny temperature then overflows to -inf at most."""
    return (logits - logits.amax(-1, keepdim=True)) / parameters.temperature


def _floor(values: torch.Tensor, scaled: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    """The smallest value that top-k and then top-p keep, [rows, 1]; `values` are the largest of `scaled`, descending.

    Top-p keeps the fewest tokens whose probabilities, after top-k, sum up to at least p.
    """
    limited = (parameters.top_k > 0) & (parameters.top_k <= values.shape[1])
    floor = torch.where(limited, _kth(values, parameters), float("-inf"))
    weights = values.double().exp().masked_fill(values < floor, 0)
    total = torch.where(limited, weights.sum(-1, keepdim=True), scaled.exp().sum(-1, keepdim=True, dtype=torch.float64))
    before = weights.cumsum(-1) - weights
    last = ((before < parameters.top_p * total) & (weights > 0)).sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(parameters.top_p < 1, torch.maximum(floor, values.gather(1, last)), floor)


def _kth(values: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    """The value that top-k keeps last, [rows, 1]; any where it is off."""
    return values.gather(1, (parameters.top_k.clamp(1, values.shape[1]) - 1))


def _choose(values: torch.Tensor, indices: torch.Tensor, floor: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    noisy = (values + gumbel_noise(parameters.keys, indices)).masked_fill(values < floor, float("-inf"))
    return indices.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1)


def gumbel_noise(keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, for each of `indices` under its row's key: int64 [rows, 1] and [..., count].

    -log(E) for E = -log(1 - u), with u from 53 bits of the hash. Large noise comes of small u, which float32 holds to
    full precision.
    """
    bits = _mix(keys + (indices + 1) * _GOLDEN)
    odd = (bits >> 11).bitwise_and_(2**53 - 1).bitwise_or_(1)  # never 0, whose noise would be infinite
    u = odd.float().mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014; Stafford's variant 13) on int64: the same bits on any device."""
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Without copying the sign, which torch's shift of a signed integer does."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
