"""Loading and calling the Lua scripts: what every script is given, and nothing of what any one of them does.

A script's text is the numbers of `contract.py`, then `common.lua`, then its folder's own `shared.lua` if it has one,
then its own file, so that a number or a helper exists once. Worker scripts are loaded from the worker's folder by the
same runner.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from . import contract
from .contract import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

_COMMON: Final = Path(__file__).with_name("scripts") / "common.lua"
_CONSTANTS: Final = (
    "WIRE_VERSION",
    "JOB_TTL_MS",
    "RESULT_TTL_MS",
    "READER_TTL_MS",
    "DEAD_TTL_MS",
    "DEAD_LENGTH",
    "BELL_TTL_S",
    "BELL_LENGTH",
)


@cache
def load_script(folder: Path, name: str) -> str:
    """The whole text of the script `name` of a folder, as it is sent to the server."""
    constants = "".join(f"local {constant} = {getattr(contract, constant)}\n" for constant in _CONSTANTS)
    shared = folder / "shared.lua"
    parts = [_COMMON, *([shared] if shared.exists() else []), folder / f"{name}.lua"]
    return constants + "".join(path.read_text(encoding="utf-8") for path in parts)


class ScriptRunner:
    """Runs the scripts of one folder for one served model. A restarted server gets their text again by itself."""

    def __init__(self, redis: Redis, keys: Keys, folder: Path) -> None:
        self._redis = redis
        self._folder = folder
        self._scripts: dict[str, AsyncScript] = {}
        self._fixed_keys = [keys.queue, keys.running, keys.deadlines, keys.bell]
        self._names = [keys.prefix, keys.model]

    async def run(self, name: str, *args: str | bytes | int | float) -> Any:
        """The script's answer. Raises redis' own errors: OutOfMemoryError when a full server refuses the write."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._redis.register_script(load_script(self._folder, name))
        return await script(keys=self._fixed_keys, args=[*self._names, *args])
