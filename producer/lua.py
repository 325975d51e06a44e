"""Loading and calling the Lua scripts: what every script is given, and nothing of what any one of them does.

A script's text is the numbers of `contract.py`, then `common.lua`, then its folder's own `shared.lua` if it has one,
then its own file, so that a number or a helper exists once. Worker scripts are loaded from the worker's folder by the
same runner.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError

from . import contract
from .contract import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

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
    "MAX_PAYLOAD_BYTES",
    "MAX_CLAIM_BYTES",
)


@cache
def load_script(folder: Path, name: str) -> str:
    """The whole text of the script `name` of a folder, as it is sent to the server."""
    constants = "".join(f"local {constant} = {getattr(contract, constant)}\n" for constant in _CONSTANTS)
    shared = folder / "shared.lua"
    parts = [_COMMON, *([shared] if shared.exists() else []), folder / f"{name}.lua"]
    return constants + "".join(path.read_text(encoding="utf-8") for path in parts)


@cache
def _digest(text: str) -> str:
    """The name under which a server keeps a script."""
    return sha1(text.encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Runs the scripts of one folder for one served model. A server that has forgotten one gets its text again."""

    def __init__(self, redis: Redis, keys: Keys, folder: Path) -> None:
        self._redis: Any = redis
        self._folder = folder
        self._keys = (keys.queue, keys.running, keys.deadlines, keys.bell)
        self._names = (keys.prefix, keys.model)

    async def run(self, name: str, *args: str | bytes | int | float) -> Any:
        """The script's answer. Raises redis' own errors: OutOfMemoryError when a full server refuses the write."""
        text = load_script(self._folder, name)
        arguments = (len(self._keys), *self._keys, *self._names, *args)
        try:
            return await self._redis.evalsha(_digest(text), *arguments)
        except NoScriptError:
            # Text and call in one: between a SCRIPT LOAD and its call the server could forget again.
            return await self._redis.eval(text, *arguments)
