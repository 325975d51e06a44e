"""The engine across the deaths of its child: every request goes on where it was, and only the guilty one ends."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from support.engines import (
    Start,
    answer,
    child_of,
    read_all,
    running,
    text_of,
    up_to,
)
from support.restarting import WATCHFUL, all_answered, is_up, num_tokens, submit, until_down
from support.waiting import wait_until

from inferq.engine import (
    EngineCrashedError,
)


async def test_kill_9_of_the_child_changes_no_answer(start_restarting: Start) -> None:
    engine = await start_restarting("--step-ms", "2", max_num_seqs=4)
    stream = await engine.add_request("stream", "stream", sampling=up_to(120))
    head = await running(stream)
    sinks = {prompt: submit(engine, prompt, 120) for prompt in ("one", "two", "three", "four", "five", "six")}
    for kills in (1, 2):
        seen = num_tokens(sinks)
        await wait_until(lambda seen=seen: num_tokens(sinks) > seen)
        child_of(engine).kill()
        await wait_until(lambda kills=kills: engine.num_restarts == kills and is_up(engine))
    assert head.text + text_of(await read_all(stream)) == answer("stream", 120)
    await all_answered(sinks, 120)
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


DEATHS = ["--exit-after", "--raise-after", "--garbage-after", "--hang-after"]


@pytest.mark.parametrize("how", DEATHS)
async def test_whatever_the_child_dies_of_the_requests_go_on(start_restarting: Start, tmp_path: Path, how: str) -> None:
    once = ("--once", str(tmp_path / "failed"))
    engine = await start_restarting("--step-ms", "2", how, "7", *once, restart=WATCHFUL)
    sinks = {prompt: submit(engine, prompt, 50) for prompt in ("one", "two", "three")}
    await all_answered(sinks, 50)
    assert engine.num_restarts == 1


async def test_a_child_that_hears_nothing_any_more_is_replaced(start_restarting: Start) -> None:
    engine = await start_restarting("--step-ms", "2", restart=WATCHFUL)
    sinks = {"one": submit(engine, "one", 300)}
    await wait_until(lambda: sinks["one"].deltas)
    child_of(engine).send_signal(signal.SIGSTOP)
    await all_answered(sinks, 300)
    assert engine.num_restarts == 1


@pytest.mark.parametrize("how", ["--exit-on-text", "--raise-on-text"])
@pytest.mark.parametrize("at_token", [0, 9, 40])
async def test_a_poison_ends_alone_and_all_others_as_if_it_had_never_been(
    start_restarting: Start, how: str, at_token: int
) -> None:
    engine = await start_restarting("--step-ms", "1", how, "poison", "--poison-at-token", str(at_token), max_num_seqs=3)
    sinks = {prompt: submit(engine, prompt, 80) for prompt in ("one", "two")}
    poison = submit(engine, "a poison", 80)
    sinks |= {prompt: submit(engine, prompt, 80) for prompt in ("three", "four", "five")}
    await all_answered(sinks, 80)
    await wait_until(lambda: poison.num_ends)
    assert [type(error) for error in poison.errors] == [EngineCrashedError]
    assert "for the second time while request 'a poison' ran alone" in str(poison.errors[0])
    assert answer("a poison", 80).startswith(poison.text)
    assert len(poison.token_ids) <= at_token
    assert engine.is_running
    assert engine.num_restarts == 3


@pytest.mark.slow
async def test_a_poison_that_hangs_is_found_too(start_restarting: Start) -> None:
    engine = await start_restarting("--step-ms", "1", "--hang-on-text", "poison", restart=WATCHFUL)
    sinks = {"one": submit(engine, "one", 50)}
    poison = submit(engine, "a poison", 50)
    await all_answered(sinks, 50)
    await wait_until(lambda: poison.num_ends)
    assert "a step took more than 1.5 s" in str(poison.errors[0])


async def test_several_poisons_are_found_one_after_the_other(start_restarting: Start) -> None:
    engine = await start_restarting("--exit-on-text", "poison")
    sinks = {f"prompt {i}": submit(engine, f"prompt {i}", 60) for i in range(3)}
    poisons = [submit(engine, f"poison {i}", 60) for i in range(3)]
    await all_answered(sinks, 60)
    await wait_until(lambda: all(poison.num_ends for poison in poisons))
    assert all(isinstance(poison.errors[0], EngineCrashedError) for poison in poisons)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_kills_at_random_moments_change_no_answer(start_restarting: Start, seed: int) -> None:
    dice = random.Random(seed)
    engine = await start_restarting("--step-ms", "1", "--tokens-per-step", "2", max_num_seqs=4)
    sinks = {f"prompt {i}": submit(engine, f"prompt {i}", 150) for i in range(10)}
    for _ in range(4):
        # So far apart that nobody is alone at two deaths without having generated enough in between.
        goal = num_tokens(sinks) + dice.randint(150, 250)
        await wait_until(lambda goal=goal: num_tokens(sinks) >= goal and is_up(engine))
        await until_down(engine)
    await all_answered(sinks, 150)
