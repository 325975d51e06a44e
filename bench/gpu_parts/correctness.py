"""Part 1: runs the checks of the kernels, and says the worst of each beside its bound."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Final

import torch
from figures import table

from . import oracle
from .budget import TimeBudget
from .checks import Case, Check, Draw
from .memory import memory_shortage

#: What has to be left for a case to begin, Triton's compiler included: a guess on the safe side.
CASE_SECONDS: Final = 5.0
#: Kernels whose error is no rounding: a count, or a share of rows.
EXACT: Final = ("kv_write", "sample")


def run_checks(
    cases: Sequence[Case], budget: TimeBudget, *, device: torch.device, dtype: torch.dtype, seed: int
) -> list[Check]:
    """Each case with numbers of its own. One that raises is one that does not hold."""
    checks = []
    for number, (kernel, case, run, bound) in enumerate(cases):
        if not budget.allows(f"{kernel} ({case})", CASE_SECONDS):
            continue
        try:
            with torch.inference_mode():
                error = run(Draw.on(device, dtype, seed + number))
        except Exception as exc:
            if (lack := memory_shortage(exc)) is not None:
                budget.skip(f"{kernel} ({case})", f"no memory for it: {lack}")
                continue
            print(f"{kernel} ({case}) failed:\n{traceback.format_exc()}", flush=True)
            error = float("inf")
        checks.append(Check(kernel, case, error, oracle.BOUNDS[dtype] if bound is None else bound))
    return checks


def worst(checks: Sequence[Check]) -> dict[str, Check]:
    """Of each kernel, the check with the largest error."""
    kernels = dict.fromkeys(check.kernel for check in checks)
    return {k: max((c for c in checks if c.kernel == k), key=lambda c: c.error) for k in kernels}


def checks_table(checks: Sequence[Check]) -> str:
    rows = []
    for kernel, check in worst(checks).items():
        count = sum(c.kernel == kernel for c in checks)
        error, bound = f"{check.error:.1e}", f"{check.bound:.1e}"
        rows.append((kernel, count, error, bound, "yes" if check.holds else "NO", check.case))
    return table(("kernel", "cases", "worst error", "bound", "holds", "worst case"), rows)


def max_error(checks: Sequence[Check]) -> float:
    """The largest rounding error of all kernels."""
    return max((check.error for check in checks if check.kernel not in EXACT), default=float("nan"))
