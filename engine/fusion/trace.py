"""One small forward pass, written down: which module was called with what, from where, and what it answered.

What a model is fused by is not the names of its modules but what they were seen doing here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from inferq.engine.attention import AttentionParams
from inferq.engine.attention.hook import IMPLEMENTATION, attending
from inferq.engine.attention.rotation import rotating

_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Rotation:
    """A call of a modeling module's `rotate(query, key, cos, sin, *args, **kwargs)`, and its output."""

    rotate: Callable[..., Any]
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    output: Any


@dataclass(eq=False, slots=True)
class Call:
    """A call of a module; `parent` is the call it was made in."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: Call | None
    children: list[Call] = field(default_factory=list)
    output: Any = None
    attends: bool = False  #: the attention function was called in it, however deep
    rotations: list[Rotation] = field(default_factory=list)
    #: The query and the key [tokens, heads, dim] of each call of the attention function right in this one.
    attended: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def only_input(self) -> torch.Tensor | None:
        """The tensor that it was called with, if with nothing else."""
        return None if self.kwargs else self.first_input

    @property
    def first_input(self) -> torch.Tensor | None:
        """The tensor that it was called with, if with nothing else but by name."""
        return self.args[0] if len(self.args) == 1 and isinstance(self.args[0], torch.Tensor) else None

    def uses(self, value: object) -> bool:
        return any(given is value for given in (*self.args, *self.kwargs.values()))

    def is_inside(self, other: Call) -> bool:
        call: Call | None = self
        while call is not None and call is not other:
            call = call.parent
        return call is not None


class PointwiseAttention:
    """A LayerAttention without a cache: each token sees itself only, as strongly as its query likes its key."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        return value * torch.sigmoid((query * key).sum(-1, keepdim=True) * params.scale)


class Trace(PointwiseAttention):
    """The calls of one forward pass, in the order in which they began."""

    def __init__(self, model: Any) -> None:
        self.calls: list[Call] = []
        self._by_module: dict[nn.Module, list[Call]] = defaultdict(list)
        self._open: list[Call] = []
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
        positions = torch.arange(_TOKENS, device=model.device).unsqueeze(0)
        model.set_attn_implementation(IMPLEMENTATION)
        hooks = [
            hook
            for module in model.modules()
            for hook in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave),
            )
        ]
        try:
            with attending(self), rotating(self._rotate):
                model(ids, position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, module: nn.Module) -> list[Call]:
        return self._by_module.get(module, [])

    def plain_inputs(self, module: nn.Module) -> list[torch.Tensor]:
        """What the module was called with, if each time with one tensor and nothing else."""
        inputs = [call.only_input for call in self.of(module)]
        return [x for x in inputs if x is not None] if all(x is not None for x in inputs) else []

    def only(self, module: nn.Module) -> Call | None:
        """The module's call, if it was called once."""
        calls = self.of(module)
        return calls[0] if len(calls) == 1 else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self._open[-1].attended.append((query, key))
        for call in self._open:
            call.attends = True
        return super().attend(layer, query, key, value, params)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(module, args, kwargs, self._open[-1] if self._open else None)
        if call.parent is not None:
            call.parent.children.append(call)
        self.calls.append(call)
        self._by_module[module].append(call)
        self._open.append(call)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._open.pop().output = output

    def _rotate(self, rotate: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        output = rotate(*inputs, **options)
        self._open[-1].rotations.append(Rotation(rotate, inputs, options, output))
        return output
