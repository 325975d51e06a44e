"""Two versions of the worker on one queue, as in every deploy: each goes on with what the other one has begun."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from support.disturbed import Answers, Disturbance, Fleet, fault
from support.processes import all_gone
from support.tree import ROOT


@pytest.fixture
def newer(tmp_path: Path) -> dict[str, str]:
    """The environment of another version: its scripts are others to the server, its `started` has a field more.

    The folders are copied as the namespace that they are installed as, and found before the installed ones.
    """
    package = tmp_path / "inferq"
    for folder in ("producer", "worker", "engine", "cuda"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shared = package / "worker" / "scripts" / "shared.lua"
    text = shared.read_text()
    old = 'local data = \'{"attempt":%d,'
    assert old in text, "the newer version writes another `started`"
    text = text.replace(old, 'local data = \'{"new_in_this_version":[1,{"a":2}],"attempt":%d,')
    shared.write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


@pytest.mark.timeout(600)
@fault
@pytest.mark.parametrize("first", ["older", "newer"])
async def test_streams_move_from_one_version_to_the_other(
    first: str, newer: dict[str, str], steady: Fleet, answers: Answers
) -> None:
    """Killed and drained, in either direction: the wire's answers are the undisturbed ones."""
    versions = [{}, newer] if first == "older" else [newer, {}]
    begun = await steady.only(environment=versions[0])
    async with steady.producer() as producer:
        streams = Disturbance(steady, producer)
        await streams.begin()
        await streams.until(100)
        family = begun.family()
        begun.send(signal.SIGKILL)
        heir = steady.start("--drain-seconds", "0.2", environment=versions[1])
        await all_gone(family, timeout=10)
        await streams.until(300)
        heir.send(signal.SIGTERM)
        last = steady.start(environment=versions[0])
        assert await heir.wait() == 0
        await streams.check(answers, last)
        assert any("new_in_this_version" in each for each in await streams.raw_starts()), "both were there"
    await steady.retire()
