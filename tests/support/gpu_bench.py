"""Stand-ins for what the GPU benchmark runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inferq.engine.errors import ModelLoadError


def loading(cause: Exception) -> ModelLoadError:
    """As the engine raises it."""
    try:
        raise ModelLoadError("not enough") from cause
    except ModelLoadError as exc:
        return exc


class Runner:
    """Of a runner what its cache is asked for."""

    def __init__(self, num_blocks: int) -> None:
        self.facts = SimpleNamespace(num_blocks=num_blocks, block_size=64, vocab_size=10)
        self.launched: list[Any] = []

    def launch(self, scheduled: list[Any]) -> SimpleNamespace:
        self.launched = scheduled
        return SimpleNamespace(tokens=lambda: [0] * len(scheduled))
