"""Gumbel noise that is a function of a seed, a position and a token, and of nothing else: that of the engine's sampler.

Triton functions, without a launch of their own.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

#: The odd number nearest to 2**64 divided by the golden ratio.
_GOLDEN: Final = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def noise_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The key of a row's noise, uint64, of its seed and its position, int64."""
    return _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * _GOLDEN)


@triton.jit
def gumbel_noise(key: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise, float32, of each of tokens: -log(E), E = -log(1 - u), u from 53 bits of the hash.

    Small u make large noise, and 1 - u rounds much of a small u away. So -log(1 - u) is taken as -log(w) * u / (1 - w)
    for w = 1 - u as it is rounded: both factors' errors cancel (the log1p of Hewlett-Packard's calculators).
    """
    bits = _mix(key + (tokens.to(tl.uint64) + 1) * _GOLDEN)
    odd = (bits >> 11) | 1  # never 0, whose noise would be infinite
    u = tl.minimum(odd.to(tl.float32) * 2.0**-53, 1 - 2.0**-24)
    w = 1 - u
    gap = 1 - w
    exponential = tl.where(gap > 0, -tl.log(w) * tl.div_rn(u, tl.where(gap > 0, gap, 1.0)), u)
    return -tl.log(exponential)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014; Stafford's variant 13), on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
