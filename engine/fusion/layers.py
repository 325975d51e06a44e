"""Decoder layers whose residual adds become part of the norms that follow them.

A layer is recognised by the order in which it calls its modules: norm, attention, norm, MLP, where attention and MLP
may have a norm behind them, too. Its last add is left to the next layer's first norm, or to the model's final norm,
if the trace shows that the layer's output goes there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from inferq.engine.attention.hook import attending

from .norms import Norm
from .rewrite import Forward, Rewrites, agree, answers, random, stand_ins
from .trace import Call, PointwiseAttention, Trace

#: What a layer calls, in order: norm, attention, mlp.
_PRE_NORM: Final = "nanm"
_FOUR_NORMS: Final = "nannmn"


class _Link:
    """An add on its way from the layer that leaves it to the norm that makes it."""

    def __init__(self) -> None:
        self._branch: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None

    def leave(self, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._branch, self._residual = branch, residual
        return branch

    def take(self, branch: torch.Tensor) -> torch.Tensor:
        """The residual to which `branch` has still to be added."""
        left, residual, self._branch, self._residual = self._branch, self._residual, None, None
        if residual is None or left is not branch:
            raise RuntimeError("a layer's output does not reach the next layer unchanged")
        return residual


@dataclass(frozen=True, slots=True)
class _Parts:
    """The calls that a layer makes, in their order; of norms behind attention and MLP there may be none."""

    before_attention: Call
    attention: Call
    after_attention: Call | None
    before_mlp: Call
    mlp: Call
    after_mlp: Call | None

    @property
    def norms(self) -> list[Call]:
        calls = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [call for call in calls if call is not None]


class _FusedLayer:
    """Takes the place of a layer's forward. Keeps no Call: with it the whole trace would stay in memory."""

    def __init__(self, layer: Call, parts: _Parts, norms: Mapping[nn.Module, Norm]) -> None:
        def norm(call: Call | None) -> Norm | None:
            return None if call is None else norms[call.module]

        self.received: _Link | None = None
        self.left: _Link | None = None
        self._attention, self._mlp = parts.attention.module, parts.mlp.module
        self._before_attention, self._before_mlp = norms[parts.before_attention.module], norms[parts.before_mlp.module]
        self._after_attention, self._after_mlp = norm(parts.after_attention), norm(parts.after_mlp)
        self._names_input = not parts.attention.args
        passed = {name: value for name, value in parts.attention.kwargs.items() if name != "hidden_states"}
        self._passed = frozenset(passed)
        self._constants = {name: value for name, value in passed.items() if name not in layer.kwargs}

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.received is None:
            residual = hidden_states.clone()  # what follows adds to it in place
            normed = self._before_attention(hidden_states)
        else:
            residual = self.received.take(hidden_states)
            normed = self._before_attention.add(hidden_states, residual)
        branch = _first(self._attend(normed, options))
        if self._after_attention is not None:
            branch = self._after_attention(branch)
        branch = _first(self._mlp(self._before_mlp.add(branch, residual)))
        if self._after_mlp is not None:
            branch = self._after_mlp(branch)
        return residual.add_(branch) if self.left is None else self.left.leave(branch, residual)

    def _attend(self, normed: torch.Tensor, options: dict[str, Any]) -> Any:
        passed = self._constants | {name: value for name, value in options.items() if name in self._passed}
        if self._names_input:
            return self._attention(hidden_states=normed, **passed)
        return self._attention(normed, **passed)


def fuse_layers(
    modules: Iterable[nn.Module], trace: Trace, norms: Mapping[nn.Module, Norm], rewrites: Rewrites
) -> tuple[int, int]:
    """The number of layers whose adds are part of norms, and of those that leave the last one to what follows.

    A norm reads the sum anyway: with the add in it, the residual is read and written once less for each add.
    """
    layers: dict[nn.Module, _FusedLayer] = {}
    for module in modules:
        call = trace.only(module)
        parts = None if call is None else _parts(call, norms)
        if call is None or parts is None or not _has_form(call, parts):
            continue
        layer = _FusedLayer(call, parts, norms)
        if _answers_alike(layer, call):
            layers[module] = layer
            rewrites.set_forward(module, layer.forward)
    return len(layers), sum(_link(module, layers, trace, norms, rewrites) for module in layers)


def _parts(layer: Call, norms: Mapping[nn.Module, Norm]) -> _Parts | None:
    if layer.first_input is None:
        return None
    calls = [call for call in layer.children if not isinstance(call.module, nn.Dropout)]
    kinds = "".join("n" if call.module in norms else "a" if call.attends else "m" for call in calls)
    if kinds not in (_PRE_NORM, _FOUR_NORMS) or len({call.module for call in calls}) < len(calls):
        return None
    if kinds == _PRE_NORM:
        before_attention, attention, before_mlp, mlp = calls
        parts = _Parts(before_attention, attention, None, before_mlp, mlp, None)
    else:
        parts = _Parts(*calls)
    plain = all(call.only_input is not None for call in (*parts.norms, parts.mlp))
    return parts if plain and _passes_on(layer, parts.attention) else None


def _passes_on(layer: Call, attention: Call) -> bool:
    """Whether the layer gives its options on as they are, and adds only constants of its own.

    A fused layer calls the attention module itself, and must know what to give it: an option that the layer computes
    from others would be that of the traced call for ever.
    """
    for name, value in attention.kwargs.items():
        if name in layer.kwargs:
            if value is not layer.kwargs[name]:
                return False
        elif name != "hidden_states" and not (value is None or isinstance(value, bool)):
            return False
    return len(attention.args) == (0 if "hidden_states" in attention.kwargs else 1)


def _has_form(layer: Call, parts: _Parts) -> bool:
    """Whether the layer, around stand-ins for its modules, computes what a layer of this form does."""
    x = random(3, layer.args[0].shape[-1], like=layer.args[0], dtype=torch.float32).unsqueeze(0)
    factors = [random(x.shape[-1], like=x, seed=seed) for seed in range(1, 7)]
    norms: dict[nn.Module, Forward] = {
        call.module: lambda x, factor=factor: torch.tanh(x) * factor
        for call, factor in zip(parts.norms, factors, strict=False)
    }

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden_states.roll(1, -1) * factors[4]

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.roll(2, -1)) * factors[5]

    forwards = norms | {
        parts.attention.module: lambda *args, **kwargs: _like(parts.attention.output, attend(*args, **kwargs)),
        parts.mlp.module: lambda x: _like(parts.mlp.output, mlp(x)),
    }
    with stand_ins(forwards):
        actual = answers(layer.module.forward, x, **layer.kwargs)

    def norm(call: Call | None, x: torch.Tensor) -> Any:
        return x if call is None else norms[call.module](x)

    middle = x + norm(parts.after_attention, attend(norm(parts.before_attention, x)))
    return agree(actual, middle + norm(parts.after_mlp, mlp(norm(parts.before_mlp, middle))))


def _answers_alike(layer: _FusedLayer, call: Call) -> bool:
    with attending(PointwiseAttention()):
        return agree(layer.forward(call.args[0], **call.kwargs), call.output)


def _link(
    module: nn.Module,
    layers: Mapping[nn.Module, _FusedLayer],
    trace: Trace,
    norms: Mapping[nn.Module, Norm],
    rewrites: Rewrites,
) -> bool:
    """Leaves the layer's last add to the norm that its output goes to, in the next layer or behind the last one.

    False, with the layer as it was, where something else uses the output as well: it would get it without the add.
    """
    output = trace.of(module)[0].output
    users = [call for call in trace.calls if call.uses(output)]
    if not users or not all(call.is_inside(users[0]) for call in users):
        return False
    user, link = users[0], _Link()
    if user.module in layers:
        layers[user.module].received = link
    elif user.module in norms and trace.only(user.module) is user:
        norm = norms[user.module]
        rewrites.set_forward(user.module, lambda x: norm.add(x, link.take(x)))
    else:
        return False
    layers[module].left = link
    return True


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _like(output: Any, tensor: torch.Tensor) -> Any:
    """`tensor`, in a tuple where `output` is one."""
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor
