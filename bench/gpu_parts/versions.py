"""The versions that the figures depend on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

import torch

#: Distributions besides torch, some of which need not be there.
_DISTRIBUTIONS = ("triton", "transformers", "flash-attn", "flash-attn-3")


def versions() -> str:
    """In one line; what is not installed is left out."""
    found = {
        "torch": torch.__version__,
        **{name: _version(name) for name in _DISTRIBUTIONS},
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
    }
    return ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # triton has come under other names, too.
        return getattr(sys.modules.get(name), "__version__", None)
