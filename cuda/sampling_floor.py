"""The search for a row's floor, the smallest value that top-k or top-p keeps. For the kernels of sampling.py.

It goes through the bits of the logits, made unsigned integers in the order of the numbers: the floor is the largest key
at or above which the elements weigh at least a target. For top-k an element weighs 1 and the target is k; for top-p it
weighs exp of its scaled logit, and the target is p times the total. A step settles one digit of the key: each part of
the row weighs what it has at or above every value of that digit, and the programs of the next step add up the parts.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

DIGIT_BITS: Final = tl.constexpr(4)
#: Values of a digit.
DIGITS: Final = tl.constexpr(16)
INFINITY: Final = tl.constexpr(float("inf"))


@triton.jit
def top_k_floor(
    prefixes: tl.tensor,
    masses: tl.tensor,
    top_ks: tl.tensor,
    floors: tl.tensor,
    by_count: tl.tensor,
    maximum: tl.tensor,
    temperature: tl.tensor,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The scaled value that top-k's last step found, -inf where there is no top-k; to `floors`, too."""
    row = tl.program_id(0)
    floor = tl.full((), -INFINITY, tl.float32)
    if by_count:
        key = settle(prefixes, masses, tl.load(top_ks + row).to(tl.float64), STEPS - 1, PARTS)
        floor = scale(ordered_logit(key, STEPS), maximum, temperature)
    if tl.program_id(1) == 0:
        tl.store(floors + row, floor)
    return floor


@triton.jit
def target_mass(
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    masses: tl.tensor,
    targets: tl.tensor,
    step: tl.tensor,
    BY_MASS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """What there has to be at or above the floor. The first step's masses have the total in them, for later steps."""
    row = tl.program_id(0)
    if not BY_MASS:
        return tl.load(top_ks + row).to(tl.float64)
    if step > 1:
        target = tl.load(targets + row)
    else:
        target = tl.load(top_ps + row) * tl.max(_mass_above(masses, PARTS), axis=0)
        if tl.program_id(1) == 0:
            tl.store(targets + row, target)
    return target


@triton.jit
def settle(
    prefixes: tl.tensor, masses: tl.tensor, target: tl.tensor, step: tl.tensor, PARTS: tl.constexpr
) -> tl.tensor:
    """The key as far as `step` settles it, from that step's masses and from what the steps before settled.

    prefixes are int64 [steps, rows]. The digit is the largest at or above which there still is the target.
    """
    enough = (_mass_above(masses, PARTS) >= target).to(tl.int32)
    digit = tl.maximum(tl.sum(enough, axis=0) - 1, 0)
    before = prefixes + (step - 1) * tl.num_programs(0) + tl.program_id(0)
    return tl.load(before, mask=step > 0, other=0).to(tl.uint32) | place(digit, step)


@triton.jit
def _mass_above(masses: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """What the row's elements at or above each value of a digit weigh, all parts together."""
    part, digits = tl.arange(0, triton.next_power_of_2(PARTS)), tl.arange(0, DIGITS)
    cells = (tl.program_id(0).to(tl.int64) * PARTS + part)[:, None] * DIGITS + digits[None, :]
    return tl.sum(tl.load(masses + cells, mask=(part < PARTS)[:, None], other=0.0), axis=0)


@triton.jit
def place(digit: tl.tensor, step: tl.tensor) -> tl.tensor:
    """A digit where the step has it in a key; the first is the most significant."""
    return digit.to(tl.uint32) << (32 - DIGIT_BITS * (step + 1))


@triton.jit
def scale(values: tl.tensor, maximum: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Shifted, so that the largest is 0, and over temperature: rounded as on a CPU, which Triton's / is not."""
    shifted = values - maximum
    return tl.div_rn(shifted, tl.zeros_like(shifted) + temperature)


@triton.jit
def ordered_key(values: tl.tensor) -> tl.tensor:
    """The bits of float32 numbers, changed so that as unsigned integers they have the order of the numbers."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def ordered_logit(key: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """The number of a key of STEPS digits. The bits below these are zero in every logit, whatever they are in a key."""
    low: tl.constexpr = 32 - DIGIT_BITS * STEPS
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return (bits >> low << low).to(tl.float32, bitcast=True)
