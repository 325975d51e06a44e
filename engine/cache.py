"""Folders in the user's cache that are made once: locked while they are made, and never seen half made.

Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root(configured: str | None) -> Path:
    """`configured`, else `inferq` in $XDG_CACHE_HOME or ~/.cache."""
    if configured is not None:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferq"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build` if it is not there.

    `build` fills an empty folder beside it, which is renamed into place at the end: an interruption leaves nothing
    that looks finished, and of several processes one builds while the others wait for it.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            # We hold the lock, so what lies here is of a builder that was interrupted.
            for left in folder.parent.glob(f"{folder.name}.part-*"):
                shutil.rmtree(left, ignore_errors=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
            try:
                build(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that the kernel drops with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
