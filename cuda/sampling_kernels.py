"""The kernels of sampling.py. A program has one part of a row; the grid is [rows, parts]."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from .gumbel import gumbel_noise, noise_key
from .sampling_floor import (
    DIGITS,
    INFINITY,
    ordered_key,
    ordered_logit,
    place,
    scale,
    settle,
    target_mass,
    top_k_floor,
)

_GREEDY_BELOW: Final = tl.constexpr(1e-5)
_LAST_TOKEN: Final = tl.constexpr(2**31 - 1)


@triton.jit
def maximum_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    maxima: tl.tensor,
    greedy: tl.tensor,
    PART: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The largest logit of each part, and the first token that has it."""
    row, part = tl.program_id(0), tl.program_id(1)
    cell = row.to(tl.int64) * PARTS + part
    values, tokens = _load_tokens(logits + row.to(tl.int64) * stride, part * PART, VOCABULARY, PART)
    _store_best(maxima + cell, greedy + cell, values, tokens)


@triton.jit(do_not_specialize=["step"])
def narrow_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    maxima: tl.tensor,
    prefixes: tl.tensor,
    masses: tl.tensor,
    masses_before: tl.tensor,
    floors: tl.tensor,
    targets: tl.tensor,
    step: tl.tensor,
    BY_MASS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """A step towards a row's floor: of top-k, or, BY_MASS and after all of these, of top-p among what top-k keeps.

    LANES logits are weighed at once, a sum for each of them and each value of the digit. A part whose largest logit is
    below what is known of the floor is not read.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    maximum, _, by_count, by_mass = _limits(temperatures, top_ks, top_ps, maxima, VOCABULARY, PARTS)
    temperature = tl.load(temperatures + row)
    floor = tl.full((), -INFINITY, tl.float32)
    if BY_MASS:
        if step > 0:
            floor = tl.load(floors + row)
        else:
            floor = top_k_floor(prefixes, masses_before, top_ks, floors, by_count, maximum, temperature, STEPS, PARTS)
    if not (by_mass if BY_MASS else by_count):
        return

    prefix = tl.full((), 0, tl.uint32)
    if step > 0:
        target = target_mass(top_ks, top_ps, masses_before, targets, step, BY_MASS, PARTS)
        prefix = settle(prefixes, masses_before, target, step - 1, PARTS)
        if part == 0:
            tl.store(prefixes + (step - 1) * tl.num_programs(0) + row, prefix.to(tl.int64))

    digits = tl.arange(0, DIGITS)
    cell = row.to(tl.int64) * PARTS + part
    largest = tl.load(maxima + cell)
    if (ordered_key(largest) < prefix) | (scale(largest, maximum, temperature) < floor):
        tl.store(masses + cell * DIGITS + digits, tl.zeros([DIGITS], tl.float64))
        return
    pivots = prefix | place(digits, step)
    above = tl.zeros([DIGITS, LANES], tl.float64 if BY_MASS else tl.int32)
    for begin in tl.static_range(0, PART, LANES):
        start = part * PART + begin
        values, tokens = _load_tokens(logits + row.to(tl.int64) * stride, start, VOCABULARY, LANES)
        if BY_MASS:
            scaled = scale(values, maximum, temperature)
            weights = tl.where(scaled >= floor, tl.exp(scaled.to(tl.float64)), 0.0)
        else:
            weights = (tokens < VOCABULARY).to(tl.int32)
        above += tl.where(ordered_key(values)[None, :] >= pivots[:, None], weights[None, :], 0)
    tl.store(masses + cell * DIGITS + digits, tl.sum(above, axis=1).to(tl.float64))


@triton.jit
def pick_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    maxima: tl.tensor,
    prefixes: tl.tensor,
    masses: tl.tensor,
    floors: tl.tensor,
    targets: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    noisy: tl.tensor,
    picked: tl.tensor,
    STEPS: tl.constexpr,
    PART: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The largest scaled logit plus noise among what each part keeps, and the first token that has it."""
    row, part = tl.program_id(0), tl.program_id(1)
    maximum, is_sampled, _, by_mass = _limits(temperatures, top_ks, top_ps, maxima, VOCABULARY, PARTS)
    if not is_sampled:
        return
    temperature = tl.load(temperatures + row)
    floor = tl.load(floors + row)
    if by_mass:
        target = target_mass(top_ks, top_ps, masses, targets, STEPS, True, PARTS)
        key = settle(prefixes, masses, target, STEPS - 1, PARTS)
        # Nothing at all weighs a target of 0, but the largest is kept.
        floor = scale(ordered_logit(tl.minimum(key, ordered_key(maximum)), STEPS), maximum, temperature)

    cell = row.to(tl.int64) * PARTS + part
    if scale(tl.load(maxima + cell), maximum, temperature) < floor:
        tl.store(noisy + cell, -INFINITY)
        tl.store(picked + cell, part * PART)
        return
    values, tokens = _load_tokens(logits + row.to(tl.int64) * stride, part * PART, VOCABULARY, PART)
    scaled = scale(values, maximum, temperature)
    key = noise_key(tl.load(seeds + row), tl.load(positions + row))
    kept = tl.where(scaled >= floor, scaled + gumbel_noise(key, tokens), -INFINITY)
    _store_best(noisy + cell, picked + cell, kept, tokens)


@triton.jit
def finish_kernel(
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    maxima: tl.tensor,
    greedy: tl.tensor,
    noisy: tl.tensor,
    picked: tl.tensor,
    chosen: tl.tensor,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The token of a row's best part, of equals the first; the grid is [rows]."""
    _, is_sampled, _, _ = _limits(temperatures, top_ks, top_ps, maxima, VOCABULARY, PARTS)
    if is_sampled:
        values, tokens = _load_parts(noisy, -INFINITY, PARTS), _load_parts(picked, _LAST_TOKEN, PARTS)
    else:
        values, tokens = _load_parts(maxima, -INFINITY, PARTS), _load_parts(greedy, _LAST_TOKEN, PARTS)
    first = tl.min(tl.where(values == tl.max(values, axis=0), tokens, _LAST_TOKEN), axis=0)
    tl.store(chosen + tl.program_id(0), first.to(tl.int64))


@triton.jit
def _load_tokens(row: tl.tensor, begin: tl.tensor, VOCABULARY: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """COUNT of a row's logits as float32, NaN and what is past the end as -inf, and their tokens."""
    tokens = begin + tl.arange(0, COUNT)
    values = tl.load(row + tokens, mask=tokens < VOCABULARY, other=-INFINITY).to(tl.float32)
    return tl.where(values == values, values, -INFINITY), tokens


@triton.jit
def _store_best(best: tl.tensor, first: tl.tensor, values: tl.tensor, tokens: tl.tensor) -> None:
    """The largest of a part's values, none of them NaN, and the first token that has it."""
    largest = tl.max(values, axis=0)
    tl.store(best, largest)
    tl.store(first, tl.min(tl.where(values == largest, tokens, _LAST_TOKEN), axis=0))


@triton.jit
def _load_parts(found: tl.tensor, other: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """What each part of the program's row found."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    return tl.load(found + tl.program_id(0).to(tl.int64) * PARTS + part, mask=part < PARTS, other=other)


@triton.jit
def _limits(
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    maxima: tl.tensor,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The row's largest logit, and whether the row is sampled, limited by top-k, and limited by top-p."""
    row = tl.program_id(0)
    maximum = tl.max(_load_parts(maxima, -INFINITY, PARTS), axis=0)
    top_k = tl.load(top_ks + row)
    is_sampled = (tl.load(temperatures + row) >= _GREEDY_BELOW) & (top_k != 1) & (tl.abs(maximum) < INFINITY)
    by_count = is_sampled & (top_k > 0) & (top_k < VOCABULARY)
    return maximum, is_sampled, by_count, is_sampled & (tl.load(top_ps + row) < 1)
