"""What the kernels' tests need to notice a wrong or a missing number: exact references, and no lucky memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

#: Half the distance of two neighbours, as a share of a number. Of bfloat16 the whole: there the interpreter cuts off.
_SHARE: Final = {torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-7}


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, *, magnitude: torch.Tensor | float = 1.0) -> None:
    """`actual` is `exact`, in float64, computed in float32 from numbers of `magnitude` and then rounded to its dtype.

    Of float32 itself a few of its last bits may differ. NaN must be where it is in `exact`.
    """
    missing = exact.isnan()
    assert torch.equal(actual.isnan(), missing)
    format = torch.finfo(actual.dtype)
    allowed = 1.01 * _SHARE[actual.dtype] * exact.abs() + 2**-20 * magnitude + format.smallest_normal * format.eps
    excess = (actual.double() - exact).abs() - allowed
    worst = excess.masked_fill(missing, -1).argmax()
    assert excess.flatten()[worst] <= 0 or missing.all(), f"{actual.flatten()[worst]} for {exact.flatten()[worst]}"


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Each number is the same, and NaN is where NaN is."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Within it `torch.empty` and its kin answer NaN, so that a number that nobody wrote is noticed."""
    torch.use_deterministic_algorithms(True)  # what `torch.utils.deterministic.fill_uninitialized_memory` goes by
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def huge_tensor(folder: Path, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written: a file with holes."""
    return torch.from_file(str(folder / "huge"), shared=True, size=num_elements, dtype=dtype)
