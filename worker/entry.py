"""The command `inferq-worker`, also where the worker's packages are missing: then one line says what to install.

A base install, which a web app gets, has the command but not what it needs.
"""

from __future__ import annotations

import sys
from typing import Final

#: `Exit.USAGE`, which cannot be imported here.
_USAGE: Final = 2


def main() -> None:
    """Run the worker; see `main.py`."""
    try:
        from .main import main as run
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("inferq"):
            raise
        sys.stderr.write(f"inferq-worker: {exc.name} is not installed: pip install 'inferq[worker]'\n")
        sys.exit(_USAGE)
    run()
