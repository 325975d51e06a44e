"""The next token of each row of logits, chosen on the device: temperature, top-k, top-p and Gumbel-max.

The launches depend on the shape and the dtype of the logits alone, so a CUDA graph can hold them; what a row asks for
is read from device memory, and a program that has nothing to do for its row ends at once. A row is cut into parts, each
a program, so that a few rows fill the device too. How it is cut and the order of its sums depend on the vocabulary
alone: a row's neighbours do not change its token.
"""

from __future__ import annotations

from typing import Final

import torch
import triton

from .sampling_floor import DIGIT_BITS, DIGITS
from .sampling_kernels import finish_kernel, maximum_kernel, narrow_kernel, pick_kernel
from .strides import require_dense_rows

#: Logits of a part, a program: sixteen a thread.
PART: Final = 4096
WARPS: Final = 8
#: How many leading bits of a logit can differ once it is a float32; the rest is zero. Whole digits.
_KEY_BITS: Final = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}


def _lanes() -> int:
    """The logits that are weighed at once: one a thread, so that sums stay in registers. Interpreted, a whole part."""
    return PART if triton.knobs.runtime.interpret else 32 * WARPS


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Writes the chosen token id of each row of `logits` [rows, vocabulary] to `chosen` int64 [rows].

    logits are float32, float16 or bfloat16; temperature float32 (greedy below 1e-5), top_k int64 (0 is off, 1 is
    greedy), top_p float64 (1 is off), seeds and positions int64, all [rows]; a position is where in its sequence the
    chosen token will stand. The order is temperature, top-k, top-p; tokens that tie with the last one kept are kept.
    NaN counts as -inf, and a row whose largest logit is infinite is greedy. There are three launches and two for each
    four bits in which logits can differ: 19 for float32, 13 for float16, 11 for bfloat16. Raises ValueError where a
    last dimension is not contiguous.
    """
    row_limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    require_dense_rows(logits=logits, **row_limits, seeds=seeds, positions=positions, chosen=chosen)
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    parts = triton.cdiv(vocabulary, PART)
    launch = {"VOCABULARY": vocabulary, "PARTS": parts, "num_warps": WARPS}
    steps = _KEY_BITS[logits.dtype] // DIGIT_BITS.value

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    # Each by itself: where the second half of one begins would follow from the rows, and a kernel is compiled by that.
    maxima, noisy = (empty(rows, parts, dtype=torch.float32) for _ in range(2))
    greedy, picked = (empty(rows, parts, dtype=torch.int32) for _ in range(2))
    floors, targets = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.float64)
    prefixes = empty(steps, rows, dtype=torch.int64)
    # A step's programs read what the step before them wrote all the while that others of them write.
    before, after = (empty(rows, parts, DIGITS.value, dtype=torch.float64) for _ in range(2))

    grid, limits = (rows, parts), (*row_limits.values(), maxima)
    maximum_kernel[grid](logits, logits.stride(0), maxima, greedy, PART=PART, **launch)
    for by_mass in (False, True):
        for step in range(steps):
            narrow_kernel[grid](
                logits,
                logits.stride(0),
                *limits,
                prefixes,
                after,
                before,
                floors,
                targets,
                step,
                BY_MASS=by_mass,
                STEPS=steps,
                LANES=_lanes(),
                PART=PART,
                **launch,
            )
            before, after = after, before
    pick_kernel[grid](
        logits,
        logits.stride(0),
        *limits,
        prefixes,
        before,
        floors,
        targets,
        seeds,
        positions,
        noisy,
        picked,
        STEPS=steps,
        PART=PART,
        **launch,
    )
    finish_kernel[(rows,)](*limits, greedy, noisy, picked, chosen, **launch)
