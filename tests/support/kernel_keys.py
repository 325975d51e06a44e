"""Counts what Triton would compile, without compiling: each launch is given a kernel that does nothing.

How a launch is told from others is Triton's own: by the types of its arguments, and by what it sees of their addresses
and numbers. The tensors may be real ones, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from triton.runtime.jit import JITFunction

from support.compiled import Card, launches

_NOTHING: Final = SimpleNamespace(
    launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
)


@contextmanager
def compilations(card: Card) -> Iterator[list[tuple[str, str]]]:
    """The list gets the name of a kernel, and the key of what it is compiled for, each time one would be compiled.

    Nothing that was compiled before this counts as there.
    """
    compiled: list[tuple[str, str]] = []
    compile_kernel = JITFunction._do_compile

    def note(kernel: Any, key: str, signature: Any, device: int, *_: Any) -> Any:
        compiled.append((kernel.__name__, key))
        kernel.device_caches[device][0][key] = _NOTHING
        return _NOTHING

    JITFunction._do_compile = note
    try:
        with launches(card):
            yield compiled
    finally:
        JITFunction._do_compile = compile_kernel
