"""Fails when a file of the project's own code is over 300 lines: then it is more than one idea, and wants a cut."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("producer", "worker", "engine", "cuda", "bench", "examples", "tools")
SUFFIXES = {".py", ".lua", ".cpp", ".cu", ".h"}
MAX_LINES = 300


def main() -> int:
    over = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                lines = len(path.read_text().splitlines())
                if lines > MAX_LINES:
                    over.append(f"{path.relative_to(ROOT)}: {lines} lines, {MAX_LINES} is the most; cut it by ideas")
    print("\n".join(over))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
