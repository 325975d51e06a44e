"""Compiles kernels exactly as a launch on a card would, on a machine without one, and reads the machine code.

The launch is Triton's own, from the call of a kernel down to `ptxas`: only its driver is replaced, by one for a card
that is not there. It loads nothing and runs nothing, but keeps each kernel with its grid. The tensors are on torch's
meta device: they have shapes, strides and aligned addresses, and a host that reads one of them raises.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from support.pairs import as_parameters

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
#: A kernel keeps what was compiled for a device as long as it lives, so each is used once; real ones count from 0.
_devices = itertools.count(1000)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


class Card(NamedTuple):
    """What a launch asks of a card."""

    capability: int  #: 80 is sm_80
    shared_bytes: int  #: the most shared memory that a block may have

    def __str__(self) -> str:
        return f"sm_{self.capability}"


SM_80 = Card(80, 163 * 1024)
SM_89 = Card(89, 99 * 1024)
SM_90 = Card(90, 227 * 1024)

#: To compile a kernel takes a second or two, so a small run does it for few cases.
COMPILED = pytest.mark.slow(family="compiled", share=0.02)


def compiled_cases(
    core: Sequence[dict[str, Any]], cases: Sequence[dict[str, Any]], mark: pytest.MarkDecorator = COMPILED
) -> list[Any]:
    """What a test is parametrized with: the core runs always, the rest of the cases has the mark."""
    return [
        pytest.param(*parameter.values, id=parameter.id, marks=mark if parameter.marks else ())
        for parameter in as_parameters(core, cases)
    ]


@dataclass(frozen=True, eq=False)
class MachineCode:
    """What `ptxas` made of one kernel."""

    cubin: bytes
    shared_bytes: int  #: asked for at the launch; the little that the code reserves by itself is not in it

    @functools.cached_property
    def _dump(self) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.cubin)
            command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    @functools.cached_property
    def _resources(self) -> tuple[int, ...]:
        (resources,) = _RESOURCES.findall(self._dump)
        return tuple(int(number) for number in resources)

    @property
    def registers(self) -> int:
        """Of each thread."""
        return self._resources[0]

    @property
    def stack_bytes(self) -> int:
        """What each thread keeps in device memory because registers do not hold it."""
        return self._resources[1] + self._resources[2]

    @functools.cached_property
    def instructions(self) -> Counter[str]:
        """How often each instruction stands in the code, by its name with all modifiers."""
        return Counter(_INSTRUCTION.findall(self._dump))

    @property
    def memory_instructions(self) -> dict[str, int]:
        return {name: n for name, n in self.instructions.items() if name.startswith(("LD", "ST"))}

    def count(self, operation: str, *modifiers: str) -> int:
        """The instructions of this operation (`LDG`) that have all these modifiers (`E`, `128`)."""
        wanted = {operation, *modifiers}
        return sum(n for name, n in self.instructions.items() if wanted.issubset(name.split(".")))


@dataclass(frozen=True)
class Launch:
    """One kernel that went to the card."""

    kernel: str
    key: str  #: of the kernel as it was compiled: another key is another compilation
    grid: tuple[int, int, int]
    threads: int  #: of a block
    constants: dict[str, Any]  #: what the kernel was compiled for, by the name of its parameter
    code: MachineCode


class _AbsentCard:
    """Triton's driver for a card that is not there. It is its own `utils`."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._device = next(_devices)
        self.utils = self
        self.launches: list[Launch] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._card.capability, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._card.shared_bytes}

    def load_binary(
        self, name: str, cubin: bytes, shared_bytes: int, device: int
    ) -> tuple[None, MachineCode, int, int, int]:
        """The module, the function, its registers, its spills, and the most threads that a block may have."""
        return None, MachineCode(cubin, shared_bytes), 0, 0, 1024

    def launcher_cls(self, source: ASTSource, metadata: Any) -> Callable[..., None]:
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items()}

        def launch(x: int, y: int, z: int, stream: int, code: MachineCode, *_: object) -> None:
            threads = 32 * metadata.num_warps
            self.launches.append(Launch(metadata.name, metadata.hash, (x, y, z), threads, constants, code))

        return launch


@contextmanager
def launches(card: Card) -> Iterator[list[Launch]]:
    """Within it all Triton kernels go to this card, and the list gets them in the order of their launches.

    Raises Triton's `OutOfResources` at a launch that needs more shared memory than the card has.
    """
    driver = _AbsentCard(card)
    triton.runtime.driver.set_active(driver)
    try:
        yield driver.launches
    finally:
        triton.runtime.driver.set_active(None)


def absent(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without contents."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def fresh_cache(folder: Path) -> Iterator[None]:
    """Within it Triton keeps what it compiled here, and finds nothing that was compiled before."""
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        yield


def check_registers(launch: Launch, *, at_most: int = 255, stack_bytes: int = 0) -> None:
    """No more of a thread than this lives in device memory."""
    code = launch.code
    assert code.stack_bytes <= stack_bytes, f"{launch.kernel}: {code.stack_bytes} bytes of stack"
    spills = code.count("LDL") + code.count("STL")
    assert spills == 0 or stack_bytes, f"{launch.kernel} spills: {code.memory_instructions}"
    assert code.registers <= at_most, f"{launch.kernel}: {code.registers} registers"


def check_grid(launch: Launch) -> None:
    """The first dimension of a grid has 31 bits, the others have 16."""
    assert 0 < launch.grid[0] < 2**31 and all(0 < size < 2**16 for size in launch.grid[1:]), launch


def check_wide_access(launch: Launch, *, loads: int, stores: int, narrow_stores: bool = False) -> None:
    """At least so many loads and stores of 16 bytes, the widest there are, and no narrower store if not allowed."""
    code = launch.code
    wide = code.count("STG", "128")
    assert code.count("LDG", "128") >= loads, f"{launch.kernel} loads narrowly: {code.memory_instructions}"
    assert wide >= stores, f"{launch.kernel} stores narrowly: {code.memory_instructions}"
    assert narrow_stores or code.count("STG") == wide, f"{launch.kernel} stores narrowly: {code.memory_instructions}"


def check_async_copies(launch: Launch, tile_bytes: int) -> None:
    """Asynchronous copies of 16 bytes bring a whole tile to shared memory before the loop, and the next within it."""
    code = launch.code
    copied = 16 * launch.threads * code.count("LDGSTS", "BYPASS", "128")
    assert copied >= 2 * tile_bytes, (
        f"{launch.kernel} copies {copied} bytes of {tile_bytes}: {code.memory_instructions}"
    )


def check_tensor_cores(launch: Launch, dtype: torch.dtype) -> None:
    """Products on tensor cores, of operands in this type, summed in float32."""
    products = [name.split(".") for name in launch.code.instructions if name.startswith(("HMMA.", "HGMMA."))]
    assert products, f"{launch.kernel} does not use tensor cores"
    for modifiers in products:
        assert "F32" in modifiers and ("BF16" in modifiers) == (dtype is torch.bfloat16), ".".join(modifiers)
