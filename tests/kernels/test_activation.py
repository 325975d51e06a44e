"""The gated activations against float64, and against what transformers' feed-forward layers compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from support.rounding import assert_rounded_once, assert_same, huge_tensor, nan_in_new_memory
from transformers.activations import ACT2FN

from inferq.cuda.activation import Activation, gated

ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# exp(x) is infinite for the sigmoid of a very negative number, which is then zero, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def no_lucky_memory() -> Iterator[None]:
    with nan_in_new_memory():
        yield


def assert_exact(output: torch.Tensor, gate_up: torch.Tensor, activation: Activation) -> None:
    """In float32, 1 + erf(x) keeps no more digits of a small result than of a large one."""
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded_once(output, exact(gate_up, activation), magnitude=(gate * up).abs())


def exact(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_computed_in_float32_and_rounded_once(activation: Activation, dtype: torch.dtype) -> None:
    gate_up = 2 * torch.randn(3, 2 * 1500).to(dtype)
    output = gated(gate_up, activation)
    assert output.dtype == dtype and output.shape == (3, 1500) and output.is_contiguous()
    assert_exact(output, gate_up, activation)


@pytest.mark.parametrize("intermediate", [1, 7, 1024, 1025, 2048])
def test_any_width(intermediate: int) -> None:
    gate_up = torch.randn(2, 2 * intermediate)
    assert_exact(gated(gate_up, "silu"), gate_up, "silu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ends_of_the_range(activation: Activation) -> None:
    """Nothing overflows on the way: a large gate passes, a very negative one is zero."""
    gate = torch.tensor([-3e38, -1e20, -1e5, -100.0, -0.0, 0.0, 100.0, 1e5, 1e20, 3e38])
    output = gated(torch.cat([gate, torch.ones(10)])[None], activation)
    torch.testing.assert_close(output[0], gate.relu(), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("activation", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")]
)
def test_it_is_what_transformers_calls_so(activation: Activation, name: str) -> None:
    gate_up = 3 * torch.randn(2, 2 * 96)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(gated(gate_up, activation), ACT2FN[name](gate) * up, rtol=1e-5, atol=1e-5)


def test_rows_may_be_part_of_wider_ones() -> None:
    wide = torch.full((4, 300), float("nan"))
    gate_up = wide[:, 20 : 20 + 2 * 70].copy_(torch.randn(4, 140))
    assert_exact(gated(gate_up, "gelu"), gate_up, "gelu")
    every_second = gate_up[::2]
    assert_exact(gated(every_second, "gelu"), every_second, "gelu")


def test_leading_dimensions_stay() -> None:
    gate_up = torch.randn(1, 3, 2 * 40)
    output = gated(gate_up, "silu")
    assert output.shape == (1, 3, 40)
    assert_exact(output, gate_up, "silu")


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    gate_up = torch.randn(3, 2 * 40)
    alone = gated(gate_up[1:2], "silu")
    gate_up[[0, 2]] = float("nan")
    assert_same(gated(gate_up, "silu")[1:2], alone)


def test_no_rows() -> None:
    assert gated(torch.empty(0, 64, dtype=torch.float16), "silu").shape == (0, 32)


def test_rows_far_apart(tmp_path: Path) -> None:
    """The row and the distance fit into 32 bits, and their product does not."""
    distance = 2**30
    rows = huge_tensor(tmp_path, 2 * distance + 16, torch.float16).as_strided((3, 16), (distance, 1))
    rows.copy_(torch.randn(3, 16))
    assert_exact(gated(rows, "silu"), rows, "silu")


def test_a_last_dimension_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="last dimension of gate_up is not contiguous"):
        gated(torch.empty(3, 64)[:, ::2], "silu")


@given(gates=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=8), activation=st.sampled_from(ACTIVATIONS))
def test_any_gate(gates: list[float], activation: Activation) -> None:
    gate_up = torch.tensor([gates + [1.0] * len(gates)])
    assert_exact(gated(gate_up, activation), gate_up, activation)
