"""Models for comparing with transformers: the demo's real one, converted once into the user's cache, and tiny ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """SmolLM2-135M-Instruct as a folder; what is in the user's cache is used again."""
    from inferq.engine.cache import cache_root
    from inferq.engine.convert import demo_model_dir

    return demo_model_dir(cache_root(None))


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, whose attention matters for its output."""
    from support.models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", std=0.2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The suites share few cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
