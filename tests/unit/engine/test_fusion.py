"""Fusing a model changes how it is computed and not what; what is not exactly of a known form is left alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.torch_ops import TORCH_OPS, RotatingAttention, add_rms_norm, gated, rms_norm
from torch import nn

from inferq.engine.attention.hook import ZeroAttention, attending
from inferq.engine.conformance import Gate
from inferq.engine.fusion import Fusion, Ops, fuse
from inferq.engine.fusion.trace import Call

#: Norms, MLPs, layers, carried adds, projections, rotations, of models of two layers.
LLAMA_LIKE = (5, 2, 2, 2, 2, 2)
EXPECTED: dict[str, tuple[int, int, int, int, int, int]] = {
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": (9, 2, 2, 2, 2, 2),
    "gemma": LLAMA_LIKE,
    "gemma2": (9, 2, 2, 2, 2, 2),
    "gemma3_text": (13, 2, 2, 2, 2, 2),
    "glm4": (9, 2, 2, 2, 2, 2),
    "phi3": (5, 2, 2, 2, 0, 2),
    "smollm3": LLAMA_LIKE,
    "granite": (5, 2, 0, 0, 2, 2),
    "olmo2": (9, 2, 0, 0, 2, 2),
    "cohere2": (0, 2, 0, 0, 2, 2),
    "qwen3_moe": (9, 0, 2, 2, 2, 2),
    "mixtral": (5, 0, 2, 2, 2, 2),
    "gpt_oss": (5, 0, 2, 2, 2, 2),
    "gpt_neox": (0, 0, 0, 0, 0, 2),
    "gpt2": (0, 0, 0, 0, 0, 0),
    "phi": (0, 0, 0, 0, 2, 0),
    "stablelm": (0, 2, 0, 0, 2, 0),
}
FIELDS: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.22},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.5},
    "phi3": {"partial_rotary_factor": 0.5},
    "llama": {"attention_bias": True, "mlp_bias": True},
}
QUICK = ("llama", "qwen3", "gemma2", "phi3", "glm4", "cohere2", "gpt_oss")
ARCHITECTURES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]


def build(architecture: str) -> Any:
    """A model whose every parameter matters."""
    model = tiny_model(architecture, std=0.2, **FIELDS.get(architecture, {}))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "sinks" not in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: Any) -> torch.Tensor:
    """Of the gate's sequences, by the whole way that serves them: prompts, then single tokens."""
    attention = RotatingAttention(block_size=4)
    with torch.inference_mode():
        return torch.cat(Gate(model)._paged_logits(attention))


@contextmanager
def fused(model: Any, ops: Ops = TORCH_OPS, *, rotary: bool = False) -> Iterator[Fusion]:
    fusion = fuse(model, ops, rotary=rotary)
    try:
        yield fusion
    finally:
        fusion.undo()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fused_model_computes_the_same(architecture: str) -> None:
    model = build(architecture)
    gate = Gate(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = logits(model)
    fusion = fuse(model, TORCH_OPS, rotary=True)
    assert tuple(fusion.report.values()) == EXPECTED[architecture]
    _check_close(logits(model), before)
    gate.check(RotatingAttention(block_size=4))
    fusion.undo()
    assert torch.equal(logits(model), before)
    after = model.state_dict()
    assert after.keys() == weights.keys() and all(torch.equal(after[name], weights[name]) for name in weights)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_as_much_is_fused_in_short_numbers(architecture: str, dtype: torch.dtype) -> None:
    model = build(architecture).to(dtype)
    gate = Gate(model)
    with fused(model, rotary=True) as fusion:
        assert tuple(fusion.report.values()) == EXPECTED[architecture]
        gate.check(RotatingAttention(block_size=4))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_every_operation_is_used_as_often_as_there_are_places_for_it(activation: str) -> None:
    calls: list[str] = []

    def counted(name: str, operation: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), operation(*args, **kwargs))[1]

    ops = Ops(
        rms_norm=counted("norm", rms_norm), add_rms_norm=counted("add", add_rms_norm), gated=counted("gated", gated)
    )
    model = tiny_model("llama", std=0.2, hidden_act=activation)
    gate = Gate(model)
    with fused(model, ops):
        calls.clear()
        Gate(model)
        # Only the very first norm has no add before it; the last layer's second add is the final norm's.
        passes = calls.count("norm")
        assert passes > 0
        assert (calls.count("add"), calls.count("gated")) == (4 * passes, 2 * passes)
        gate.check(RotatingAttention(block_size=4))


def test_the_joined_weights_are_kept_once() -> None:
    model = build("llama")
    parameters = dict(model.named_parameters())
    with fused(model):
        layer = model.model.layers[0]
        for linears in (
            (layer.mlp.gate_proj, layer.mlp.up_proj),
            (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        ):
            for name in ("weight", "bias"):
                tensors = [getattr(linear, name) for linear in linears]
                assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
                assert tensors[0].untyped_storage().nbytes() == sum(tensor.nbytes for tensor in tensors)
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


class _Scaled(nn.Module):
    """An RMSNorm, and then something: nearly nothing, but not nothing."""

    def __init__(self, norm: Any, scale: float) -> None:
        super().__init__()
        self.weight, self.eps, self.scale = norm.weight, norm.variance_epsilon, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps) * self.scale


@pytest.mark.parametrize(("scale", "norms"), [(1.0, 5), (1.001, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_scales_besides_is_left_alone(scale: float, norms: int, dtype: torch.dtype) -> None:
    model = build("llama")
    model.model.layers[1].input_layernorm = _Scaled(model.model.layers[1].input_layernorm, scale)
    _check_left_alone(model.to(dtype), "norms", norms)


def test_a_norm_with_another_epsilon_than_it_names_is_left_alone() -> None:
    model = build("llama")
    norm = model.model.norm
    norm.forward = lambda x: rms_norm(x, norm.weight, 3 * norm.variance_epsilon)
    _check_left_alone(model, "norms", 4)


def test_modules_with_hooks_keep_their_own_forward() -> None:
    model = build("llama")
    watched = [model.model.norm, model.model.layers[0].self_attn.k_proj, model.model.layers[0].mlp.up_proj]
    seen: list[nn.Module] = []
    for module in watched:
        module.register_forward_hook(lambda module, args, output: seen.append(module))
    before = logits(model)
    with fused(model) as fusion:
        assert tuple(fusion.report.values()) == (4, 1, 2, 1, 1, 0)
        seen.clear()
        _check_close(logits(model), before)
        assert set(seen) == set(watched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [1.0, 1e-3])
def test_an_mlp_that_adds_something_is_left_alone(dtype: torch.dtype, added: float) -> None:
    model = build("llama").to(dtype)
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) + added
    _check_left_alone(model, "mlps", 1)


def test_linears_that_are_more_than_linear_are_left_alone() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.5

    model = build("qwen3")
    for module in (model.model.layers[0].self_attn.v_proj, model.model.layers[1].mlp.gate_proj):
        module.__class__ = Adapted
    before = logits(model)
    with fused(model) as fusion:
        assert (fusion.report["projections"], fusion.report["mlps"]) == (1, 1)
        _check_close(logits(model), before)


def test_a_layer_that_weighs_its_branch_is_left_alone() -> None:
    model = build("llama").to(torch.bfloat16)
    layer = model.model.layers[0]

    def forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)[0]
        hidden_states = hidden_states + 1.001 * attended
        return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

    layer.forward = forward
    _check_left_alone(model, "layers", 1)


def test_an_output_that_is_changed_between_two_layers_is_not_left_to_the_second() -> None:
    model = build("llama")
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    _check_left_alone(model, "carried_adds", 1)


def test_an_output_that_is_used_twice_is_whole() -> None:
    """As by a model that adds an early layer's output once more behind a later one."""
    model = build("llama")
    model.aside = nn.Linear(64, 64)
    outputs: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + model.aside(outputs.pop()),))
    _check_left_alone(model, "carried_adds", 1)


def test_an_output_that_is_changed_after_fusing_is_an_error() -> None:
    model = build("llama")
    with fused(model), torch.inference_mode(), attending(ZeroAttention()):
        hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        with pytest.raises(RuntimeError, match="does not reach the next layer unchanged"):
            model(torch.ones(1, 3, dtype=torch.int64))
        hook.remove()


def test_a_projection_of_another_input_is_computed_for_itself() -> None:
    model = build("qwen2")
    attention = model.model.layers[0].self_attn
    first, second = torch.randn(2, 1, 3, 64)
    names = ("q_proj", "k_proj", "v_proj")
    with torch.inference_mode():
        expected = {name: [getattr(attention, name)(x) for x in (first, second)] for name in names}
        with fused(model):
            torch.testing.assert_close(attention.q_proj(first), expected["q_proj"][0])
            torch.testing.assert_close(attention.k_proj(second), expected["k_proj"][1])
            torch.testing.assert_close(attention.v_proj(first), expected["v_proj"][0])
            torch.testing.assert_close(attention.v_proj(first), expected["v_proj"][0])


def test_an_operation_that_fails_leaves_the_model_as_it_was() -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise ZeroDivisionError

    model = build("llama")
    before = logits(model)
    for ops in (
        Ops(rms_norm=rms_norm, add_rms_norm=broken, gated=gated),
        Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, gated=broken),
    ):
        with pytest.raises(ZeroDivisionError):
            fuse(model, ops, rotary=True)
    assert torch.equal(logits(model), before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_callers_embeddings_are_not_written_to() -> None:
    model = build("llama")
    with fused(model), torch.inference_mode():
        embeddings = model.get_input_embeddings()(torch.ones(1, 3, dtype=torch.int64))
        kept = embeddings.clone()
        model.set_attn_implementation("eager")
        model(inputs_embeds=embeddings, use_cache=False)
    assert torch.equal(embeddings, kept)


def test_what_was_traced_does_not_stay_in_memory() -> None:
    def num_calls() -> int:
        gc.collect()
        return sum(type(thing) is Call for thing in gc.get_objects())

    before = num_calls()
    with fused(build("gemma2"), rotary=True):
        assert num_calls() == before


def test_fusing_in_inference_mode() -> None:
    model = build("llama")
    before = logits(model)
    with torch.inference_mode(), fused(model) as fusion:
        assert fusion.report["projections"] == 2
    with fused(model):
        _check_close(logits(model), before)


def _check_left_alone(model: Any, kind: str, count: int) -> None:
    before = logits(model)
    with fused(model) as fusion:
        assert fusion.report[kind] == count
        _check_close(logits(model), before)


def _check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if expected.dtype == torch.float32 else 2e-2)
