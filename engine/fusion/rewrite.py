"""What all fusions share: replacing forwards and putting them back, and the measure by which results are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeGuard

import torch
from torch import nn

Forward = Callable[..., Any]

#: The relative error allowed between a module and what replaces it: of each row in float32, else of the median row,
#: since rounding can turn a router of experts the other way for single ones.
_TOLERANCES: Final = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class Rewrites:
    """Forwards of modules, replaced for single instances; `undo` puts all of them back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_forward(self, module: nn.Module, forward: Forward) -> None:
        before = vars(module).get("forward")
        self._undo.append(lambda: delattr(module, "forward") if before is None else setattr(module, "forward", before))
        module.forward = forward

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


@contextmanager
def stand_ins(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Within it, the modules do something simple and known, so that what their parent does with them can be seen.

    That is exact in float32 whatever the weights are; a difference of a few percent in a branch would be lost in the
    rounding of bfloat16.
    """
    rewrites = Rewrites()
    try:
        for module, forward in forwards.items():
            rewrites.set_forward(module, forward)
        yield
    finally:
        rewrites.undo()


def answers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """What `forward` answers, or None if it fails: a module that is merely like another may fail in any way."""
    try:
        return forward(*args, **kwargs)
    except Exception:
        return None


def agree(actual: Any, expected: Any) -> bool:
    """Whether two tensors [..., width] are the same but for rounding."""
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    if actual.shape != expected.shape or actual.dtype != expected.dtype or expected.dtype not in _TOLERANCES:
        return False
    norms = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    errors = (actual.float() - expected.float()).norm(dim=-1) / norms
    error = errors.max() if expected.dtype == torch.float32 else errors.median()
    return bool(error <= _TOLERANCES[expected.dtype])


def random(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device=like.device, dtype=dtype or like.dtype)


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether it is torch's own Linear and nothing more: no subclass, no hooks, no forward of its own."""
    return type(module) is nn.Linear and module.weight.is_floating_point() and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling it does more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
