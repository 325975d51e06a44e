"""The ACL file lists the commands that the code and the scripts use: none is missing, and none is there for nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.client import PubSub
from support.acl import USERS_FILE
from support.tree import ROOT

PRODUCER, WORKER = ROOT / "producer", ROOT / "worker"
SCRIPTS = PRODUCER / "scripts"
#: The names by which our code goes by connections, and the methods that are no command of their own.
CONNECTIONS = {"redis", "_redis", "client", "connection", "_connection", "_line", "pipe", "pubsub"}
METHODS = {name for kind in (redis.asyncio.Redis, PubSub) for name in dir(kind)}
NO_COMMANDS = {"pipeline", "execute", "pubsub", "aclose", "from_url", "from_pool", "get_message"}
OTHER_NAMES = {"delete": "del", "config_get": "config|get"}
#: What redis-py sends by itself: the database, the health check, its own name, and MULTI around a pipeline.
OF_REDIS_PY = {"select", "ping", "client|setinfo", "multi", "exec"}
#: What a worker asks if it may, and does without if it may not.
TRIED = {"config|get"}

LUA = {
    "producer": [*SCRIPTS.glob("*.lua")],
    "worker": [*(WORKER / "scripts").glob("*.lua"), SCRIPTS / "common.lua", SCRIPTS / "expire.lua"],
    "reader": [],
}
#: What runs under each user. A worker takes the runner of the scripts from the producer's folder.
PYTHON = {
    "producer": [*PRODUCER.glob("*.py")],
    "worker": [*WORKER.glob("*.py"), PRODUCER / "lua.py"],
    "reader": [PRODUCER / f"{name}.py" for name in ("estimate", "fleet", "look", "shard", "status", "stream")],
}


def of_scripts(paths: Iterable[Path]) -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return {name.lower() for text in texts for name in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}


def of_code(paths: Iterable[Path]) -> set[str]:
    """The commands that are sent by methods of a connection."""
    calls = (node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    methods = (call.func for call in calls if isinstance(call.func, ast.Attribute))
    sent = {each.attr for each in methods if _is_connection(each.value)} & METHODS - NO_COMMANDS
    return {OTHER_NAMES.get(name, name) for name in sent}


def _is_connection(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name in CONNECTIONS


def listed() -> dict[str, str]:
    """The users of the file, and what it says of each."""
    lines = (line.split(" ", 2) for line in USERS_FILE.read_text(encoding="utf-8").splitlines())
    return {name: rules for _, name, rules in lines}


@pytest.mark.parametrize("user", ["producer", "worker", "reader"])
def test_a_user_has_the_commands_that_are_used_and_no_other(user: str) -> None:
    used = of_scripts(LUA[user]) | of_code(PYTHON[user]) | OF_REDIS_PY
    assert len(used) > 15
    assert set(re.findall(r"\+([a-z|]+)", listed()[user])) == used - TRIED


def test_every_command_in_a_script_is_found() -> None:
    """Each is named by a literal; a name that is put together would escape the list."""
    for path in (*SCRIPTS.glob("*.lua"), *(WORKER / "scripts").glob("*.lua")):
        text = path.read_text(encoding="utf-8")
        assert len(re.findall(r"redis\.p?call\b", text)) == len(re.findall(r"redis\.p?call\('[A-Z]+'", text)), path.name
        assert not re.search(r"redis\.(?!p?call\b)\w+|\bloadstring\b", text), path.name


def test_nobody_but_the_admin_has_a_group_of_commands_or_all_keys() -> None:
    users = listed()
    assert users["default"] == "off"
    for user in users.keys() - {"default", "admin"}:
        rules = users[user].replace("(", "").replace(")", "").split()
        assert not {rule for rule in rules if "@" in rule or rule in ("allkeys", "allchannels", "nopass", "~*", "&*")}
        patterns = [rule.partition("~")[2] for rule in rules if "~" in rule]
        assert all(re.match(r"(inferq|arq):", pattern) for pattern in patterns)


def test_no_password_stands_in_the_file() -> None:
    """A server does not start with the file as it is."""
    for user, rules in listed().items():
        assert user == "default" or rules.startswith(f"on #<sha256-of-{user}-password> ")
        assert ">" not in rules.replace("-password>", "")
