"""Fails for three things that no linter here can see.

* `import worker`, `from engine import ...`: the folders are subpackages of `inferq`; a bare name finds them only from
  the project's root, and would shadow a web app's own. (ruff's TID251 also reports relative imports, so it is no use.)
* A Redis key spelled outside `producer/contract.py` (and the Lua scripts): the wire's names stand in one place.
* `cuda/__init__.py`: a regular package of that name hides NVIDIA's `cuda.*` from torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("producer", "worker", "engine", "cuda")
IMPORTERS = (*LAYERS, "bench", "examples", "tests", "tools")
CONTRACT = Path("producer/contract.py")
#: A key from its start, or the tail of one behind a placeholder: f"{prefix}:{model}:queue".
KEY_START = re.compile(r"(?<![\w.:/-])(inferq|arq):[\w{]")


def bare_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] in LAYERS:
                yield node.lineno, f"imports `{name}`; say `inferq.{name}`"


def key_tails(contract: ast.Module) -> frozenset[str]:
    """The last literal parts of the contract's own keys: ':queue', ':running', ..."""
    keys = (node for node in ast.walk(contract) if isinstance(node, ast.JoinedStr))
    literals = (part.value for key in keys for part in key.values if isinstance(part, ast.Constant))
    return frozenset(text for text in literals if re.fullmatch(r":\w+:?", text))


def docstrings(tree: ast.Module) -> frozenset[int]:
    """The ids of the nodes that are only documentation."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return frozenset(id(node.value) for node in statements if isinstance(node.value, ast.Constant))


def spelled_keys(tree: ast.Module, tails: frozenset[str]) -> Iterator[tuple[int, str]]:
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            if KEY_START.search(node.value):
                yield node.lineno, f"spells a key, {node.value!r}; ask producer/contract.py for it"
        elif isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.Constant) and part.value in tails:
                    yield node.lineno, f"puts a key together with {part.value!r}; ask producer/contract.py for it"


def problems(root: Path) -> Iterator[str]:
    tails = key_tails(ast.parse((root / CONTRACT).read_text()))
    for folder in IMPORTERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root)
            tree = ast.parse(path.read_text(), filename=str(name))
            found = list(bare_imports(tree))
            if folder in LAYERS and name != CONTRACT:
                found += spelled_keys(tree, tails)
            yield from (f"{name}:{line}: {what}" for line, what in sorted(found))
    if (root / "cuda" / "__init__.py").exists():
        yield "cuda/__init__.py: must not exist, it hides NVIDIA's cuda.* (docs/decisions.md)"


def main() -> int:
    found = list(problems(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
