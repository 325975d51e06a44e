"""Loading and calling the Lua scripts: what every script is given, and nothing of what any one of them does.

A script's text is the lifetimes and bounds of `contract.py`, then `common.lua`, then its own file, so that a number or
a helper exists once. Worker scripts are loaded from the worker's folder by the same runner.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError

from .contract import (
    BELL_LENGTH,
    BELL_TTL_S,
    JOB_TTL_MS,
    MAX_CLAIM_BYTES,
    MAX_PAYLOAD_BYTES,
    RESULT_TTL_MS,
    WIRE_VERSION,
    Keys,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

_COMMON: Final = Path(__file__).with_name("scripts") / "common.lua"
_CONSTANTS: Final = {
    "WIRE_VERSION": WIRE_VERSION,
    "JOB_TTL_MS": JOB_TTL_MS,
    "RESULT_TTL_MS": RESULT_TTL_MS,
    "BELL_TTL_S": BELL_TTL_S,
    "BELL_LENGTH": BELL_LENGTH,
    "MAX_PAYLOAD_BYTES": MAX_PAYLOAD_BYTES,
    "MAX_CLAIM_BYTES": MAX_CLAIM_BYTES,
}


@cache
def load_script(folder: Path, name: str) -> str:
    """The whole text of the script `name` of a folder, as it is sent to the server."""
    constants = "".join(f"local {constant} = {value}\n" for constant, value in _CONSTANTS.items())
    return constants + _COMMON.read_text(encoding="utf-8") + (folder / f"{name}.lua").read_text(encoding="utf-8")


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

    async def run(self, name: str, *args: str | bytes | int) -> Any:
        """The script's answer. Raises redis' own errors: OutOfMemoryError when a full server refuses the write."""
        text = load_script(self._folder, name)
        arguments = (len(self._keys), *self._keys, *self._names, *args)
        try:
            return await self._redis.evalsha(_digest(text), *arguments)
        except NoScriptError:
            # Text and call in one: between a SCRIPT LOAD and its call the server could forget again.
            return await self._redis.eval(text, *arguments)
