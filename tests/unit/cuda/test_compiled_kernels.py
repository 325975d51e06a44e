"""What `ptxas` makes of the kernels around attention for two cards that need not be there, and that the check can fail.

These kernels do nothing but move data: registers hold it all, and it comes and goes 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compiled import (
    SM_80,
    SM_90,
    Launch,
    absent,
    check_grid,
    check_registers,
    check_wide_access,
    compiled_cases,
    launches,
)
from support.pairs import covering

from inferq.cuda.activation import gated
from inferq.cuda.kv_write import kv_write, rope_kv_write
from inferq.cuda.norm import add_rms_norm, rms_norm
from inferq.cuda.sampling import sample

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")

ANY = {"card": [SM_80, SM_90], "dtype": [torch.float16, torch.bfloat16]}
USUAL: dict[str, Any] = {"card": SM_90, "dtype": torch.bfloat16}
ROWS = 64


def check(launch: Launch, *, loads: int, stores: int, narrow_stores: bool = False) -> None:
    check_registers(launch, at_most=64)
    check_wide_access(launch, loads=loads, stores=stores, narrow_stores=narrow_stores)
    check_grid(launch)


def norm(case: dict[str, Any], *, rows: int = ROWS) -> list[Launch]:
    x, weight = absent(rows, case["width"], dtype=case["dtype"]), absent(case["width"], dtype=case["dtype"])
    with launches(case["card"]) as launched:
        if case["adds"]:
            add_rms_norm(x, absent(*x.shape, dtype=x.dtype), weight, 1e-6, offset=1.0)
        else:
            rms_norm(x, weight, 1e-6)
    return launched


NORM = USUAL | {"width": 4096, "adds": True}


@pytest.mark.parametrize(
    "case", compiled_cases([NORM], covering(**ANY, width=[576, 2048, 4096, 5120, 16384], adds=[False, True]))
)
def test_norm(case: dict[str, Any]) -> None:
    (launch,) = norm(case)
    check(launch, loads=2 + case["adds"], stores=1 + case["adds"])


def test_norm_of_heads() -> None:
    """Of the queries in a fused projection; 128 weights are too few for wide loads."""
    projected = absent(ROWS, 48 * 128, dtype=torch.bfloat16)
    with launches(SM_90) as launched:
        rms_norm(projected[:, : 32 * 128].view(ROWS, 32, 128), absent(128, dtype=torch.bfloat16), 1e-6)
    check(*launched, loads=1, stores=1)


def activation(case: dict[str, Any], *, rows: int = ROWS) -> list[Launch]:
    with launches(case["card"]) as launched:
        gated(absent(rows, 2 * case["width"], dtype=case["dtype"]), case["activation"])
    return launched


ACTIVATION = USUAL | {"width": 14336, "activation": "silu"}


@pytest.mark.parametrize(
    "case",
    compiled_cases([ACTIVATION], covering(**ANY, width=[1536, 11008, 14336], activation=["silu", "gelu", "gelu_tanh"])),
)
def test_activation(case: dict[str, Any]) -> None:
    (launch,) = activation(case)
    check(launch, loads=2, stores=1)


def write(case: dict[str, Any], *, rows: int = ROWS) -> list[Launch]:
    """With a rotation where the case has a `rotary_dim`."""
    heads, dtype, (key_dim, value_dim) = case["kv_heads"], case["dtype"], case["dims"]
    key, value = absent(rows, heads, key_dim, dtype=dtype), absent(rows, heads, value_dim, dtype=dtype)
    caches = [absent(600_000, heads, case["block"], dim, dtype=dtype) for dim in case["dims"]]
    slots = absent(rows, dtype=torch.int64)
    with launches(case["card"]) as launched:
        if "rotary_dim" in case:
            query = absent(rows, 4 * heads, key_dim, dtype=dtype)
            cos, sin = (absent(rows, case["rotary_dim"] // 2, dtype=torch.float32) for _ in range(2))
            rope_kv_write(query, key, value, cos, sin, *caches, slots, interleaved=case["interleaved"])
        else:
            kv_write(key, value, *caches, slots)
    return launched


WRITE = USUAL | {"dims": (128, 128), "kv_heads": 8, "block": 64}
DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)]  # of a key, of a value


@pytest.mark.parametrize(
    "case", compiled_cases([WRITE], covering(**ANY, dims=DIMS, kv_heads=[1, 3, 8], block=[16, 64, 256]))
)
def test_kv_write(case: dict[str, Any]) -> None:
    (launch,) = write(case)
    if case["kv_heads"] > 1:
        check(launch, loads=2, stores=2)
    else:  # too few elements for 16 bytes a thread
        check(launch, loads=0, stores=0, narrow_stores=True)


ROPE = WRITE | {"rotary_dim": 128, "interleaved": False}
#: Dimensions of a head, and how many of them rotate.
ROTARY = [(64, 64), (64, 16), (80, 32), (96, 96), (128, 128), (128, 64), (256, 256)]


@pytest.mark.parametrize(
    "case", compiled_cases([ROPE], covering(**ANY, rotary=ROTARY, interleaved=[False, True], kv_heads=[3, 8]))
)
def test_rope_kv_write(case: dict[str, Any]) -> None:
    if "rotary" in case:
        dim, rotary_dim = case["rotary"]
        case = case | {"dims": (dim, dim), "rotary_dim": rotary_dim, "block": 64}
    (launch,) = write(case)
    few_pairs = case["rotary_dim"] < 64 and not case["interleaved"]
    check(launch, loads=3, stores=3, narrow_stores=few_pairs)


def choose(case: dict[str, Any], *, rows: int = ROWS) -> list[Launch]:
    types = (torch.float32, torch.int64, torch.float64, torch.int64, torch.int64, torch.int64)
    with launches(case["card"]) as launched:
        sample(absent(rows, case["vocabulary"], dtype=case["dtype"]), *(absent(rows, dtype=dtype) for dtype in types))
    return launched


#: Seconds for each case: a small run leaves that out.
FIVE_KERNELS = pytest.mark.slow(family="compiled sampling", share=0)
SAMPLING = USUAL | {"vocabulary": 128256}
LOGITS = {"card": [SM_80, SM_90], "dtype": [torch.float16, torch.bfloat16, torch.float32]}


@pytest.mark.parametrize("case", compiled_cases([], covering(**LOGITS, vocabulary=[49152, 128256]), FIVE_KERNELS))
def test_sampling(case: dict[str, Any]) -> None:
    launched = {launch.key: launch for launch in choose(case)}.values()
    assert len(launched) == 5, "more kernels than kinds of kernels: each is compiled when a worker starts"
    for launch in launched:
        check_registers(launch, at_most=128)
        check_grid(launch)
        # The others read no logits, or as many as a thread has sums for.
        if launch.kernel in ("maximum_kernel", "pick_kernel"):
            assert launch.code.count("LDG", "128")


@pytest.mark.parametrize(
    "launch, case",
    [
        pytest.param(norm, NORM, id="norm"),
        pytest.param(activation, ACTIVATION, id="activation"),
        pytest.param(write, WRITE, id="kv_write"),
        pytest.param(write, ROPE, id="rope_kv_write"),
        pytest.param(choose, SAMPLING, id="sampling", marks=FIVE_KERNELS),
    ],
)
def test_no_number_of_rows_has_kernels_of_its_own(launch: Any, case: dict[str, Any]) -> None:
    """Else one would be compiled while requests wait."""
    keys = [{launched.key for launched in launch(case, rows=rows)} for rows in (1, 7, 16, 256)]
    assert all(keys[0] == others for others in keys[1:])


def test_the_check_fails_on_narrow_access() -> None:
    """Heads of an odd number of elements begin anywhere."""
    with pytest.raises(AssertionError, match="narrowly"):
        check(*write(WRITE | {"dims": (63, 63)}), loads=2, stores=2)
