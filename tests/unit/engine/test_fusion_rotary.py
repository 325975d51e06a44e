"""A rotation that is put off until attention: which layers do it, and that it never gets lost."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.torch_ops import TORCH_OPS, RotatingAttention

from inferq.engine.attention.interface import Rotary
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.attention.rotation import RotaryLayout, deferring, intercept, take_deferred
from inferq.engine.conformance import Gate
from inferq.engine.fusion import fuse

#: Pairs of halves with cos twice, with cos once, of neighbours with cos of halves, of neighbours with cos repeated.
LAYOUTS = {"llama": (False, 8), "gpt_oss": (False, 8), "glm4": (True, 4), "cohere2": (True, 8)}
FIELDS: dict[str, dict[str, Any]] = {"glm4": {"partial_rotary_factor": 0.5}}


class _Noting(RotatingAttention):
    def __init__(self) -> None:
        super().__init__(block_size=4)
        self.seen: list[Rotary] = []

    def attend_rotary(self, *args: Any) -> torch.Tensor:
        self.seen.append(args[-1])
        return super().attend_rotary(*args)


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_the_layout_is_found_by_numbers(architecture: str) -> None:
    model = tiny_model(architecture, std=0.2, **FIELDS.get(architecture, {}))
    gate, attention = Gate(model), _Noting()
    fuse(model, TORCH_OPS, rotary=True)
    gate.check(attention)
    assert len(attention.seen) == 2 * 3
    assert {(rotary.interleaved, rotary.cos.shape[-1]) for rotary in attention.seen} == {LAYOUTS[architecture]}
    assert {rotary.cos.dim() for rotary in attention.seen} == {2}


def test_an_attention_that_does_not_rotate_gets_rotated_queries() -> None:
    model = tiny_model("llama", std=0.2)
    gate = Gate(model)
    fuse(model, TORCH_OPS, rotary=True)
    gate.check(ReferenceAttention(block_size=4))


def test_nothing_is_put_off_unless_it_is_asked_for_or_after_undoing() -> None:
    model = tiny_model("llama", std=0.2)
    gate, attention = Gate(model), RotatingAttention(block_size=4)
    fuse(model, TORCH_OPS, rotary=False)
    gate.check(attention)
    fuse(tiny_model("llama"), TORCH_OPS, rotary=True)  # another model of the same modeling module
    gate.check(attention)
    assert attention.rotations == 0
    fuse(model, TORCH_OPS, rotary=True).undo()
    gate.check(attention)
    assert attention.rotations == 0


def test_outside_of_our_attention_the_model_rotates_by_itself() -> None:
    model = tiny_model("llama", std=0.2)
    ids = torch.arange(5).unsqueeze(0)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        fuse(model, TORCH_OPS, rotary=True)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("factor", "rotations"), [(1.0, 2), (1.5, 0)])
def test_a_rotation_of_another_kind_is_left_to_the_model(
    factor: float, rotations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.smollm3 import modeling_smollm3 as modeling

    own = inspect.unwrap(modeling.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, factor * sin))
    model = tiny_model("smollm3", std=0.2, no_rope_layers=[1, 1])
    gate = Gate(model)
    assert fuse(model, TORCH_OPS, rotary=True).report["rotations"] == rotations
    gate.check(RotatingAttention(block_size=4))


def test_a_layer_without_rotation_stays_without() -> None:
    model = tiny_model("smollm3", std=0.2, no_rope_layers=[1, 0])
    gate, attention = Gate(model), RotatingAttention(block_size=4)
    assert fuse(model, TORCH_OPS, rotary=True).report["rotations"] == 1
    gate.check(attention)
    assert attention.rotations == 3


def _changing_query(attention: Any) -> None:
    """As a model does that norms its queries after the rotation."""
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        from transformers.models.llama import modeling_llama as modeling

        rotate = modeling.apply_rotary_pos_emb
        try:
            modeling.apply_rotary_pos_emb = lambda *inputs: [
                x * y for x, y in zip(rotate(*inputs), (1.5, 1), strict=True)
            ]
            return own(*args, **kwargs)
        finally:
            modeling.apply_rotary_pos_emb = rotate

    attention.forward = forward


def test_a_query_that_changes_after_its_rotation_keeps_it() -> None:
    model = tiny_model("llama", std=0.2)
    _changing_query(model.model.layers[0].self_attn)
    gate = Gate(model)
    assert fuse(model, TORCH_OPS, rotary=True).report["rotations"] == 1
    gate.check(RotatingAttention(block_size=4))


def _turn(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    return query * cos, key * cos


@pytest.fixture
def turn() -> Any:
    """A modeling module's function as it is when it was intercepted."""
    namespace = {"apply_rotary_pos_emb": _turn}
    intercept(namespace)
    intercept(namespace)
    return namespace["apply_rotary_pos_emb"]


LAYOUT = RotaryLayout(interleaved=False, columns=slice(0, 4))
INPUTS = [torch.randn(shape) for shape in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8))]


def test_a_rotation_arrives_with_the_tensors_that_need_it(turn: Any) -> None:
    with deferring(LAYOUT):
        query, key = turn(*INPUTS)
        assert query is INPUTS[0] and key is INPUTS[1]
        rotary = take_deferred(query, key)
        assert rotary is not None and not rotary.interleaved
        assert torch.equal(rotary.cos, INPUTS[2][0, :, :4]) and torch.equal(rotary.sin, INPUTS[3][0, :, :4])
        assert take_deferred(query, key) is None
    assert torch.equal(turn(*INPUTS)[0], _turn(*INPUTS)[0])
    assert take_deferred(query, key) is None


@pytest.mark.parametrize("columns", [slice(0, 4), slice(0, None, 2)])
@pytest.mark.parametrize("transposed", [False, True])
def test_cos_and_sin_are_handed_out_in_rows(columns: slice, transposed: bool) -> None:
    cos, sin = (x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x for x in INPUTS[2:])
    rotary = RotaryLayout(interleaved=True, columns=columns).rotary(cos, sin)
    assert rotary.cos.stride(-1) == rotary.sin.stride(-1) == 1
    assert torch.equal(rotary.cos, cos[0, :, columns]) and torch.equal(rotary.sin, sin[0, :, columns])


@pytest.mark.parametrize("changed", [0, 1])
def test_a_rotation_of_other_tensors_is_an_error(turn: Any, changed: int) -> None:
    with pytest.raises(RuntimeError, match="changes its query or key"), deferring(LAYOUT):
        tensors = list(turn(*INPUTS))
        tensors[changed] = tensors[changed] * 2
        take_deferred(*tensors)


def test_a_rotation_that_nobody_takes_is_an_error(turn: Any) -> None:
    with pytest.raises(RuntimeError, match="no attention call took it"), deferring(LAYOUT):
        turn(*INPUTS)


def test_a_second_rotation_is_an_error(turn: Any) -> None:
    with pytest.raises(RuntimeError, match="rotates twice"), deferring(LAYOUT):
        turn(*INPUTS)
        turn(*INPUTS)
