"""Part 1: cache writes, rotary embeddings, norms and activations against float64; the sampler against the engine's."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from inferq.cuda.activation import Activation, gated
from inferq.cuda.kv_write import kv_write, rope_kv_write
from inferq.cuda.norm import add_rms_norm, rms_norm
from inferq.cuda.sampling import sample
from inferq.engine.sampler import sample as engine_sample
from inferq.engine.sequence import SequenceSampling

from . import oracle
from .checks import Case, Draw

#: Of the rows of logits, how many may get another token: of the 300 of a case none. Rounding decides where the best two
#: keys are too near to each other for float32. They are logits plus Gumbel noise, so they are less than e apart with a
#: probability of at most e, and float32 has steps of 1e-6 where they are, between 8 and 16.
SAMPLER_BOUND: Final = 1e-3
EPS: Final = 1e-5


def layer_cases(
    *, rows: int = 300, hidden: int = 4096, intermediate: int = 14336, vocabulary: int = 128256
) -> list[Case]:
    rotations = ((128, 128, False), (64, 64, True), (80, 32, False), (256, 64, True))
    norms = [(size, offset) for size in (hidden, hidden - hidden // 3) for offset in (0.0, 1.0)]
    return [
        *(Case("kv_write", f"dim {dim}", partial(check_kv_write, dim, rows), 0.0) for dim, _, _ in rotations),
        *(
            Case(
                "rope_kv_write",
                f"dim {dim}, rotary {rotary}{', interleaved' if interleaved else ''}",
                partial(check_rope, dim, rotary, interleaved, rows),
            )
            for dim, rotary, interleaved in rotations
        ),
        *(
            Case(kernel, f"hidden {size}, offset {offset:g}", partial(check, size, offset, rows))
            for size, offset in norms
            for kernel, check in (("rms_norm", check_norm), ("add_rms_norm", check_add_norm))
        ),
        *(
            Case("gated", activation, partial(check_gated, activation, intermediate, rows))
            for activation in ("silu", "gelu", "gelu_tanh")
        ),
        *(
            Case("sample", f"{name} logits", partial(check_sampler, dtype, vocabulary, rows), SAMPLER_BOUND)
            for name, dtype in (("float32", torch.float32), ("the model's", None))
        ),
    ]


def check_kv_write(dim: int, rows: int, draw: Draw) -> float:
    key, value = _fused(draw, rows, dim)[1:]
    caches, slots, places = _slots(draw, rows, dim)
    kv_write(key, value, *caches, slots)
    return sum(_wrong_slots(cache, places, entries) for cache, entries in zip(caches, (key, value), strict=True))


def check_rope(dim: int, rotary: int, interleaved: bool, rows: int, draw: Draw) -> float:
    query, key, value = _fused(draw, rows, dim)
    angles = draw.uniform(rows, rotary // 2, low=-3.2, high=3.2)
    cos, sin = angles.cos(), angles.sin()
    caches, slots, places = _slots(draw, rows, dim)
    rotated = rope_kv_write(query, key, value, cos, sin, *caches, slots, interleaved=interleaved)
    error = oracle.row_error(rotated, oracle.rotate(query, cos, sin, interleaved=interleaved))
    token, block, offset = places
    expected = oracle.rotate(key, cos, sin, interleaved=interleaved)
    error = max(error, oracle.row_error(caches[0][block, :, offset], expected[token]))
    wrong = _wrong_slots(caches[1], places, value) or _others_written(caches[0], places)
    return float("inf") if wrong else error


def check_norm(hidden: int, offset: float, rows: int, draw: Draw) -> float:
    x, weight = draw.normal(rows, hidden), draw.normal(hidden)
    return oracle.row_error(rms_norm(x, weight, EPS, offset=offset), oracle.rms_norm(x, weight, EPS, offset=offset))


def check_add_norm(hidden: int, offset: float, rows: int, draw: Draw) -> float:
    x, residual, weight = draw.normal(rows, hidden), draw.normal(rows, hidden), draw.normal(hidden)
    total = x.double() + residual.double()
    normed = add_rms_norm(x, residual, weight, EPS, offset=offset)
    return max(
        oracle.row_error(residual, total),
        oracle.row_error(normed, oracle.rms_norm(total, weight, EPS, offset=offset)),
    )


def check_gated(activation: Activation, intermediate: int, rows: int, draw: Draw) -> float:
    gate_up = draw.normal(rows, 2 * intermediate)
    return oracle.row_error(gated(gate_up, activation), oracle.gated(gate_up, activation))


def check_sampler(dtype: torch.dtype | None, vocabulary: int, rows: int, draw: Draw) -> float:
    """The share of rows whose token is not the one that the engine's own sampler chooses from the same logits."""
    logits = draw.normal(rows, vocabulary, dtype=dtype) * 3
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 50, 1.0), (1.3, 0, 0.9), (0.8, 2000, 0.95), (1.0, 0, 0.999)]
    samplings = [
        SequenceSampling(max_tokens=1, temperature=t, top_k=min(k, vocabulary - 1), top_p=p, seed=seed)
        for row, seed in enumerate(draw.integers(2**62, rows).tolist())
        for t, k, p in [kinds[row % len(kinds)]]
    ]
    positions = draw.integers(100_000, rows)
    chosen = torch.full((rows,), -1, dtype=torch.int64, device=draw.device)

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=draw.device)

    sample(
        logits,
        column([s.temperature for s in samplings], torch.float32),
        column([s.top_k for s in samplings], torch.int64),
        column([s.top_p for s in samplings], torch.float64),
        column([s.seed for s in samplings], torch.int64),
        positions,
        chosen,
    )
    expected = engine_sample(logits, samplings, positions.tolist())
    return float((chosen != expected).double().mean())


def _fused(draw: Draw, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as views of one projection's output, with 4 and 2 heads."""
    fused = draw.normal(rows, 8, dim)
    return fused[:, :4], fused[:, 4:6], fused[:, 6:]


_Caches = tuple[torch.Tensor, torch.Tensor]
_Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _slots(draw: Draw, rows: int, dim: int, block: int = 32) -> tuple[_Caches, torch.Tensor, _Places]:
    """Poisoned caches of keys and values; each token's slot, or -1; (token, block, offset) of those that have one."""
    blocks = rows // block + 2
    slots = draw.shuffled(blocks * block)[:rows]
    slots[draw.integers(rows, rows // 10)] = -1
    token = (slots >= 0).nonzero().squeeze(1)
    caches = draw.poisoned(blocks, 2, block, dim), draw.poisoned(blocks, 2, block, dim)
    return caches, slots, (token, slots[token] // block, slots[token] % block)


def _wrong_slots(cache: torch.Tensor, places: _Places, entries: torch.Tensor) -> int:
    """How many tokens are not in their slots to the bit, and one more if any other slot was written."""
    token, block, offset = places
    wrong = (cache[block, :, offset] != entries[token]).flatten(1).any(1).sum()
    return int(wrong) + _others_written(cache, places)


def _others_written(cache: torch.Tensor, places: _Places) -> bool:
    _, block, offset = places
    rest = cache.clone()
    rest[block, :, offset] = float("nan")
    return not bool(rest.isnan().all())
