"""The gate at load: it lets through what is computed right on a flat batch, and names what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import tiny_model

from inferq.engine.attention import AttentionParams, LayerShape
from inferq.engine.attention.hook import IMPLEMENTATION
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.conformance import Gate
from inferq.engine.errors import ModelLoadError

QUICK = ("llama", "qwen3", "mistral", "gemma2", "mixtral", "gpt_oss", "gpt2", "opt")
REST = (
    "qwen2 gemma gemma3_text phi3 phi olmo2 granite cohere2 smollm3 starcoder2 gpt_neox stablelm qwen3_moe glm4 exaone4"
).split()
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def check(model: Any) -> tuple[LayerShape, ...]:
    gate = Gate(model)
    gate.check(ReferenceAttention(block_size=4))
    return tuple(layer.shape for layer in gate.layers)


@pytest.mark.parametrize("architecture", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_architectures_that_are_computed_right(architecture: str) -> None:
    model = tiny_model(architecture, std=0.2)
    shapes = check(model)
    assert len(shapes) == 2
    assert all(shape.key_dim == shape.value_dim == 16 for shape in shapes)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_layers_may_keep_values_of_another_size_than_keys() -> None:
    assert check(tiny_model("deepseek_v3", std=0.2, **LATENT)) == (LayerShape(4, 16, 12),) * 2


def test_what_a_backend_is_chosen_by() -> None:
    llama, second = Gate(tiny_model("llama")).layers
    assert (llama.shape, llama.num_heads, llama.params) == (LayerShape(2, 16, 16), 4, AttentionParams(scale=0.25))
    assert llama.kind == second.kind
    windowed, full = Gate(tiny_model("gemma2")).layers
    assert (windowed.params.window, full.params.window, full.params.softcap) == (5, None, 50.0)
    assert windowed.kind != full.kind
    windowed, full = Gate(tiny_model("gpt_oss")).layers
    assert windowed.params.sinks is not None and windowed.params.sinks.shape == (4,)
    assert full.kind != llama.kind


class _BadDecodes(ReferenceAttention):
    """Right for prompts, and off by a factor for sequences that compute one token."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        output = super().attend(layer, query, key, value, params)
        return output * 1.5 if len(query) == 3 else output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_that_is_wrong_only_while_decoding_is_found(dtype: torch.dtype) -> None:
    gate = Gate(tiny_model("llama", std=0.2).to(dtype))
    gate.check(ReferenceAttention(block_size=4))
    with pytest.raises(ModelLoadError, match="on a flat batch its logits are off by"):
        gate.check(_BadDecodes(block_size=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_short_numbers_are_no_reason_to_refuse(architecture: str, dtype: torch.dtype) -> None:
    assert len(check(tiny_model(architecture, std=0.2).to(dtype))) == 2


def test_layers_that_carry_a_state_are_refused_by_type() -> None:
    with pytest.raises(ModelLoadError, match=r"'mamba' is not supported: it has layers of type linear_attention"):
        check(tiny_model("mamba"))


@pytest.mark.parametrize("architecture", ["qwen3_next", "lfm2"])
def test_hybrids_are_refused_by_type(architecture: str) -> None:
    fields = {"lfm2": {"layer_types": ["conv", "full_attention"]}}.get(architecture, {})
    with pytest.raises(ModelLoadError, match=rf"'{architecture}' is not supported: it has layers of type"):
        check(tiny_model(architecture, **fields))


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    with pytest.raises(
        ModelLoadError, match=r"'bloom' is not supported: of its 2 layers 0 use transformers' attention"
    ):
        check(tiny_model("bloom"))


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelLoadError, match=r"of its 2 layers 1 use transformers' attention interface, in 2 calls"):
        check(model)


def test_a_model_that_sees_the_future_is_refused_by_its_numbers() -> None:
    with pytest.raises(ModelLoadError, match=r"'bert' is not supported: on a flat batch its logits are off by"):
        check(tiny_model("bert", std=0.2, num_key_value_heads=None, head_dim=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_mixed_outside_of_attention_are_found_by_the_numbers(dtype: torch.dtype) -> None:
    """A token shift, as some architectures have: right for one sequence, wrong over the border between two."""
    model = tiny_model("llama", std=0.2)

    def shift(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        mixed = 0.5 * args[0] + 0.5 * torch.nn.functional.pad(args[0], (0, 0, 1, 0))[:, :-1]
        return (mixed, *args[1:])

    model.model.layers[0].register_forward_pre_hook(shift)
    with pytest.raises(ModelLoadError, match="on a flat batch its logits are off by"):
        check(model.to(dtype))


def test_positions_that_the_model_ignores_are_found_by_the_numbers() -> None:
    model = tiny_model("gpt2", std=0.2)
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True)
    with pytest.raises(ModelLoadError, match="on a flat batch its logits are off by"):
        check(model)


def test_a_forward_pass_that_fails_names_the_architecture() -> None:
    model = tiny_model("llama")
    model.model.layers[1].forward = lambda *_, **__: 1 / 0
    with pytest.raises(ModelLoadError, match=r"'llama' is not supported: its forward pass fails .*ZeroDivisionError"):
        check(model)
