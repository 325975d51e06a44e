"""What `ptxas` makes of the attention kernels for two cards that need not be there, and that the checks can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_launches import PLAIN, SPECIAL, VALUES, decode, prefill
from support.compiled import (
    Launch,
    check_async_copies,
    check_grid,
    check_registers,
    check_tensor_cores,
    fresh_cache,
)
from support.pairs import as_parameters, covering
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")

#: Of each thread of a decode kernel with heads of up to 128 and one tile of query heads: so three blocks of 128 threads
#: share a multiprocessor.
REGISTERS = 168
SPLIT = PLAIN | {"splits": 8}


def tile_bytes(launch: Launch) -> int:
    """The keys and values of one tile, of 2 bytes an element, with what pads them."""
    fixed = launch.constants
    return 2 * fixed["TILE"] * (fixed["KEY_PAD"] + fixed["VALUE_PAD"])


@pytest.mark.parametrize("case", as_parameters([SPLIT, SPECIAL | {"splits": 1}], covering(**VALUES, splits=[1, 8])))
def test_decode(case: dict[str, Any]) -> None:
    attend, *join = decode(case)
    check_registers(attend, at_most=REGISTERS if max(case["dims"]) <= 128 and case["group"] <= 16 else 255)
    check_async_copies(attend, tile_bytes(attend))
    check_tensor_cores(attend, case["dtype"])
    check_grid(attend)
    assert len(join) == (case["splits"] > 1)
    for launch in join:
        check_registers(launch, at_most=64)
        check_grid(launch)


@pytest.mark.parametrize("case", as_parameters([PLAIN, SPECIAL], covering(**VALUES)))
def test_prefill(case: dict[str, Any]) -> None:
    (attend,) = prefill(case)
    check_registers(attend)
    check_async_copies(attend, tile_bytes(attend))
    check_tensor_cores(attend, case["dtype"])
    check_grid(attend)


def test_no_length_has_kernels_of_its_own() -> None:
    """Else one would be compiled while requests wait."""
    decoded = [decode(SPLIT, rows=rows) for rows in (1, 7, 16, 256)]
    assert len({launch.key for launched in decoded for launch in launched}) == 2
    prefilled = [prefill(PLAIN, rows=rows, tokens=tokens) for rows, tokens in ((1, 1), (1, 77), (3, 16), (16, 4096))]
    assert len({launch.key for (launch,) in prefilled}) == 1


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
            check_async_copies(launch, tile_bytes(launch))

    def test_on_products_without_tensor_cores(self) -> None:
        launch = decode(SPLIT | {"dtype": torch.float32})[0]
        with pytest.raises(AssertionError, match="does not use tensor cores"):
            check_tensor_cores(launch, torch.float32)

    def test_on_products_of_another_type(self) -> None:
        with pytest.raises(AssertionError, match="MMA"):
            check_tensor_cores(decode(SPLIT)[0], torch.float16)

    def test_on_too_much_shared_memory(self, options: dict[str, Any]) -> None:
        options |= {"TILE": 128}
        with pytest.raises(OutOfResources, match="shared memory"):
            decode(SPLIT | {"dims": (256, 256), "block": 256})

    def test_on_too_large_a_grid(self) -> None:
        with pytest.raises(AssertionError, match="grid"):
            check_grid(prefill(PLAIN, rows=2**16, tokens=2**16)[0])


def test_what_was_compiled_earlier_is_not_used(tmp_path: Path) -> None:
    for name in ("one", "other"):
        with fresh_cache(tmp_path / name):
            decode(SPLIT)
        assert len(list((tmp_path / name).rglob("*.cubin"))) == 2
