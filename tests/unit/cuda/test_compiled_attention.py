"""What `ptxas` makes of the attention kernels for cards that need not be there, and that the checks can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_launches import PLAIN, SPECIAL, VALUES, WIDE, decode, prefill
from support.compiled import (
    COMPILED,
    SM_80,
    SM_89,
    SM_90,
    Card,
    Launch,
    check_async_copies,
    check_grid,
    check_registers,
    check_tensor_cores,
    compiled_cases,
    fresh_cache,
    launches,
)
from support.pairs import covering
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from inferq.cuda.paged_prefill import prefill_config

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")

#: Of each thread of a decode kernel with heads of up to 128 and one tile of query heads: so three blocks of 128 threads
#: share a multiprocessor.
REGISTERS = 168
#: Bytes of a thread that may lie in device memory in float32, for which there are no tensor cores.
SPILLED = 32
SPLIT = PLAIN | {"splits": 8}


def tile_bytes(launch: Launch, dtype: torch.dtype) -> int:
    """The keys and values of one tile, with what pads them."""
    fixed = launch.constants
    return dtype.itemsize * fixed["TILE"] * (fixed["KEY_PAD"] + fixed["VALUE_PAD"])


def check(attend: Launch, dtype: torch.dtype, *, registers: int = 255) -> None:
    check_registers(attend, at_most=registers, stack_bytes=SPILLED if dtype is torch.float32 else 0)
    check_async_copies(attend, tile_bytes(attend, dtype))
    check_grid(attend)
    if dtype is not torch.float32:
        check_tensor_cores(attend, dtype)


@pytest.mark.parametrize(
    "case",
    compiled_cases([SPLIT, SPECIAL | {"splits": 1}], covering(**VALUES, splits=[1, 8])),
)
def test_decode(case: dict[str, Any]) -> None:
    attend, *join = decode(case)
    check(attend, case["dtype"], registers=REGISTERS if max(case["dims"]) <= 128 and case["group"] <= 16 else 255)
    assert len(join) == (case["splits"] > 1)
    for launch in join:
        check_registers(launch, at_most=64)
        check_grid(launch)


@pytest.mark.parametrize("case", compiled_cases([PLAIN, SPECIAL, WIDE], covering(**VALUES)))
def test_prefill(case: dict[str, Any]) -> None:
    (attend,) = prefill(case)
    check(attend, case["dtype"])


def test_three_stages_are_in_flight_where_they_fit() -> None:
    def stages(card: Card, dims: tuple[int, int]) -> int:
        with launches(card):
            return prefill_config(key_dim=dims[0], value_dim=dims[1], dtype=torch.bfloat16, block=64).stages

    assert {dims: [stages(card, dims) for card in (SM_80, SM_89, SM_90)] for dims in VALUES["dims"]} == {
        dims: [3, 2 if dims == (256, 256) else 3, 3] for dims in VALUES["dims"]
    }


def test_no_length_has_kernels_of_its_own() -> None:
    """Else one would be compiled while requests wait."""
    decoded = [decode(SPLIT, rows=rows) for rows in (1, 7, 16, 256)]
    assert len({launch.key for launched in decoded for launch in launched}) == 2
    prefilled = [prefill(PLAIN, rows=rows, tokens=tokens) for rows, tokens in ((1, 1), (1, 77), (3, 16), (16, 4096))]
    assert len({launch.key for (launch,) in prefilled}) == 1


@COMPILED
class TestTheChecksFail:
    """With a kernel that is compiled with other options."""

    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What is put here changes the options of launches that have them."""
        options: dict[str, Any] = {}
        run = JITFunction.run

        def run_with(kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
            return run(kernel, *args, **kwargs | {name: options[name] for name in options.keys() & kwargs.keys()})

        monkeypatch.setattr(JITFunction, "run", run_with)
        return options

    def test_on_spilled_registers(self, options: dict[str, Any]) -> None:
        options |= {"num_warps": 1}
        launch = decode(SPLIT | {"dims": (256, 256)})[0]
        assert launch.code.stack_bytes and launch.code.count("STL") and launch.code.count("LDL")
        with pytest.raises(AssertionError, match="bytes of stack"):
            check_registers(launch)

    def test_on_too_many_registers(self, options: dict[str, Any]) -> None:
        options |= {"TILE": 128}
        launch = decode(SPLIT | {"block": 256})[0]
        with pytest.raises(AssertionError, match="registers"):
            check_registers(launch, at_most=REGISTERS)

    def test_on_plain_loads(self, options: dict[str, Any]) -> None:
        options |= {"num_stages": 1}
        launch = decode(SPLIT)[0]
        assert launch.code.count("LDG", "128")
        with pytest.raises(AssertionError, match="copies 0 bytes"):
            check_async_copies(launch, tile_bytes(launch, SPLIT["dtype"]))

    def test_on_products_without_tensor_cores(self) -> None:
        launch = decode(SPLIT | {"dtype": torch.float32})[0]
        with pytest.raises(AssertionError, match="does not use tensor cores"):
            check_tensor_cores(launch, torch.float32)

    def test_on_products_of_another_type(self) -> None:
        with pytest.raises(AssertionError, match="MMA"):
            check_tensor_cores(decode(SPLIT)[0], torch.float16)

    def test_on_too_much_shared_memory(self, options: dict[str, Any]) -> None:
        options |= {"num_stages": 3}
        with pytest.raises(OutOfResources, match="shared memory"):
            prefill(WIDE)

    def test_on_too_large_a_grid(self) -> None:
        with pytest.raises(AssertionError, match="grid"):
            check_grid(prefill(PLAIN, rows=2**16, tokens=2**16)[0])


@COMPILED
def test_what_was_compiled_earlier_is_not_used(tmp_path: Path) -> None:
    for name in ("one", "other"):
        with fresh_cache(tmp_path / name):
            decode(SPLIT)
        assert len(list((tmp_path / name).rglob("*.cubin"))) == 2
