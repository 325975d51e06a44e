"""The scripted engine's `--trace`: when it made which token of which prompt, and when blocks were free."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq.engine.sequence import Sequence as EngineSequence


def prompt_key(prompt: str) -> int:
    """How the trace names a prompt, whose tokens are its bytes."""
    return _key(list(prompt.encode()))


def _key(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("I", token_ids).tobytes())


class Trace:
    """When the engine did what, by the monotonic clock, which all processes of a machine share.

    A line for each token: `token NANOSECONDS PROMPT INDEX`; for each abort, when its blocks are free: `freed
    NANOSECONDS PROMPT`. A prompt goes by its checksum.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1 << 16)
        self._prompts: dict[int, int] = {}

    def admitted(self, key: int, prompt_token_ids: Sequence[int]) -> None:
        self._prompts[key] = _key(prompt_token_ids)

    def tokens(self, sampling: Iterable[EngineSequence]) -> None:
        now = time.monotonic_ns()
        lines = (f"token {now} {self._prompts[each.key]} {each.num_output_tokens}\n" for each in sampling)
        self._file.writelines(lines)
        self._file.flush()

    def freed(self, key: int) -> None:
        if (prompt := self._prompts.pop(key, None)) is not None:
            self._file.write(f"freed {time.monotonic_ns()} {prompt}\n")
            self._file.flush()


@dataclass
class EngineTrace:
    """Times in seconds of the monotonic clock, which all processes of a machine share."""

    made_at: dict[tuple[int, int], float] = field(default_factory=dict)  #: by prompt and index of the token
    freed_at: dict[int, float] = field(default_factory=dict)  #: by prompt
    steps: list[float] = field(default_factory=list)


def read_trace(path: Path) -> EngineTrace:
    trace = EngineTrace()
    for line in path.read_text().splitlines():
        kind, at, prompt, *index = line.split()
        seconds = int(at) / 1e9
        if kind == "token":
            trace.made_at[int(prompt), int(index[0])] = seconds
            if not trace.steps or trace.steps[-1] != seconds:
                trace.steps.append(seconds)
        else:
            trace.freed_at[int(prompt)] = seconds
    return trace


def step_ms(trace: EngineTrace) -> list[float]:
    """How long steps took that followed each other without a pause: of more than ten times the median."""
    gaps = sorted((after - before) * 1000 for before, after in pairwise(trace.steps))
    return [gap for gap in gaps if gap <= 10 * gaps[len(gaps) // 2]]
