"""How scripts are loaded: they agree with the contract on names and numbers, and survive a server that forgot them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from support.wire import Wire, following

import inferq.producer
import inferq.worker
from inferq.producer import contract
from inferq.producer.contract import Keys
from inferq.producer.lua import load_script
from inferq.worker.commands import DeadLetter

FOLDERS = [Path(package.__path__[0]) / "scripts" for package in (inferq.producer, inferq.worker)]
SCRIPTS = [(path.parent, path.stem) for folder in FOLDERS for path in sorted(folder.glob("*.lua"))]


def test_all_scripts_are_there() -> None:
    names = {name for _, name in SCRIPTS}
    producer = {"common", "enqueue", "cancel", "expire", "touch"}
    assert names == producer | {"shared", "claim", "renew", "publish", "finish", "reacquire", "handback", "beat"}


@pytest.mark.parametrize(("folder", "name"), SCRIPTS, ids=[name for _, name in SCRIPTS])
async def test_a_script_compiles_on_the_server(wire: Wire, folder: Path, name: str) -> None:
    own = {"common": "cancel", "shared": "finish"}.get(name, name)
    text = load_script(folder, own)
    assert len(await wire.redis.script_load(text)) == 40


@pytest.mark.parametrize(("folder", "name"), SCRIPTS, ids=[name for _, name in SCRIPTS])
def test_lifetimes_are_written_in_the_contract_alone(folder: Path, name: str) -> None:
    text = (folder / f"{name}.lua").read_text()
    numbers = {int(number) for number in re.findall(r"\b\d+\b", re.sub(r"--.*", "", text))}
    lifetimes = {contract.JOB_TTL_MS, contract.RESULT_TTL_MS, contract.READER_TTL_MS, contract.DEAD_TTL_MS}
    lifetimes |= {contract.BELL_TTL_S, 86400, 3600}
    # A request id has as many characters as the bell has places.
    assert not numbers & (lifetimes | ({contract.BELL_LENGTH} if name != "claim" else set()))


async def test_they_name_keys_as_the_contract_does(wire: Wire) -> None:
    """Under another prefix and model: what exists is what `Keys` names, and nothing else."""
    keys = Keys("some.model", prefix="team-7")
    team = Wire(wire.redis, keys)
    await team.enqueue("dying")
    (job,) = await team.claim()
    await team.worker.finish(following(job, kind="failed"), dead=DeadLetter("engine_crashed", 1))
    await team.enqueue("waiting", deadline_ms=60_000, cancel_on_disconnect=True)
    await team.producer.touch_reader("waiting")
    await team.enqueue("running")
    (job,) = await team.claim(exclude=["waiting"])
    await team.producer.cancel("running")
    await team.publish(following(job))
    await team.enqueue("ended")
    await team.producer.cancel("ended")

    expected = {keys.queue, keys.running, keys.deadlines, keys.bell, keys.vtime, keys.dead}
    expected |= {keys.events("dying"), keys.dead_payload("dying"), keys.reader("waiting")}
    expected |= {keys.job("waiting"), keys.payload("waiting"), keys.events("waiting")}
    expected |= {keys.job("running"), keys.payload("running"), keys.events("running")}
    expected |= {keys.lease("running"), keys.cancel("running"), keys.events("ended")}
    assert {key.decode() for key in await wire.redis.keys("*")} == expected


async def test_a_server_that_forgot_them_gets_them_again(wire: Wire) -> None:
    await wire.enqueue("a")
    await wire.redis.script_flush()
    (job,) = await wire.claim()
    await wire.redis.script_flush()
    assert await wire.publish(following(job)) == ["ok"]
    await wire.redis.script_flush()
    assert await wire.worker.finish(following(job, 2, kind="finished")) == "ok"
    await wire.redis.script_flush()
    assert await wire.enqueue("a")


async def test_a_server_that_forgets_them_all_the_time_still_runs_them(wire: Wire) -> None:
    """Text and call go in one command, so that nothing can come in between."""

    async def forget() -> None:
        while True:
            await wire.redis.script_flush()

    storm = asyncio.create_task(forget())
    try:
        for number in range(200):
            await wire.enqueue(f"job-{number}")
    finally:
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)
    assert await wire.redis.zcard(wire.keys.queue) == 200
