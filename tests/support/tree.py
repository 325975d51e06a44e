"""The project's tree as data: where it is, what belongs to the package, and a copy of it to break."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("producer", "worker", "engine", "cuda")
#: What the wheel carries of the layers' folders.
CARRIED = frozenset({".py", ".lua", ".typed", ".cpp"})


def package_files() -> dict[str, Path]:
    """The package's files in the tree, by the name they have when installed."""
    return {
        f"inferq/{path.relative_to(ROOT)}": path
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.is_file() and path.suffix in CARRIED
    }


def copy_tree(target: Path) -> Path:
    """What a build or a check needs, without caches and earlier builds."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in (*LAYERS, ".typecheck", "tools"):
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, target / name)
    return target
