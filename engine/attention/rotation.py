"""The door through which a model's rotary embedding is put off until attention, which may rotate where it writes.

The modeling modules of transformers rotate by a function of their own, `apply_rotary_pos_emb(query, key, cos, sin)`.
A wrapper in its place asks whoever `rotating` names; outside of that it calls the function as if it were not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from .interface import Rotary

FUNCTION: Final = "apply_rotary_pos_emb"


class Rotator(Protocol):
    def __call__(self, rotate: Callable[..., Any], /, *inputs: Any, **options: Any) -> Any:
        """What the model gets in place of `rotate(*inputs, **options)`."""
        ...


#: What stands in modeling modules in place of their functions.
_wrappers: Final[set[Callable[..., Any]]] = set()
_rotator: ContextVar[Rotator | None] = ContextVar("inferq_rotator", default=None)


def intercept(namespace: dict[str, Any]) -> None:
    """Puts the wrapper into a modeling module that has the function; once, and for good."""
    rotate = namespace[FUNCTION]
    if rotate in _wrappers:
        return

    @functools.wraps(rotate)
    def apply(*inputs: Any, **options: Any) -> Any:
        rotator = _rotator.get()
        return rotate(*inputs, **options) if rotator is None else rotator(rotate, *inputs, **options)

    _wrappers.add(apply)
    namespace[FUNCTION] = apply


@contextmanager
def rotating(rotator: Rotator) -> Iterator[None]:
    """Within it, the wrappers call `rotator`."""
    token = _rotator.set(rotator)
    try:
        yield
    finally:
        _rotator.reset(token)


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """How a modeling module lays out its rotation: which columns of its cos and sin are the R/2 of the pairs."""

    interleaved: bool
    columns: slice

    def rotary(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
        """cos and sin [1, tokens, columns], as the model makes them."""
        cos, sin = (tensor[0, :, self.columns] for tensor in (cos, sin))
        if cos.stride(-1) != 1 or sin.stride(-1) != 1:  # every other column, or made as [columns, tokens]
            cos, sin = cos.contiguous(), sin.contiguous()
        return Rotary(cos, sin, self.interleaved)


class _Deferral:
    """A Rotator that leaves query and key as they are, and keeps the rotation for the layer's attention call."""

    def __init__(self, layout: RotaryLayout) -> None:
        self._layout = layout
        self.pending: tuple[torch.Tensor, torch.Tensor, Rotary] | None = None

    def __call__(self, rotate: Callable[..., Any], /, *inputs: Any, **options: Any) -> Any:
        if self.pending is not None:
            raise RuntimeError("a layer rotates twice before it attends")
        query, key, cos, sin = inputs
        self.pending = (query, key, self._layout.rotary(cos, sin))
        return query, key


@contextmanager
def deferring(layout: RotaryLayout) -> Iterator[None]:
    """Around one layer's attention module: its rotation goes to its attention call.

    Raises RuntimeError if it does not arrive there: the layer would go unrotated.
    """
    deferral = _Deferral(layout)
    with rotating(deferral):
        yield
    if deferral.pending is not None:
        raise RuntimeError("a layer's rotation was put off, and no attention call took it")


def take_deferred(query: torch.Tensor, key: torch.Tensor) -> Rotary | None:
    """The rotation that `query` and `key` still need. Raises RuntimeError if it was meant for other tensors."""
    deferral = _rotator.get()
    if not isinstance(deferral, _Deferral) or deferral.pending is None:
        return None
    *tensors, rotary = deferral.pending
    if tensors[0] is not query or tensors[1] is not key:
        raise RuntimeError("a layer changes its query or key between the rotation and attention")
    deferral.pending = None
    return rotary
