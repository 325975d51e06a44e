"""How many blocks a claim may count on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inferq.engine.pipe import Ready, Stats
from inferq.worker.room import EngineRoom

FACTS: dict[str, Any] = {
    "model": "m",
    "text_dir": "",
    "eos_token_ids": [],
    "vocab_size": 10,
    "max_model_len": 100,
    "num_blocks": 20,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "device": "cpu",
    "attention": "x",
}


@dataclass
class Engine:
    stats: Stats | None = None
    is_restarting: bool = False
    facts: Ready = field(default_factory=lambda: Ready(**FACTS))


def test_before_the_first_step_the_whole_pool_is_free() -> None:
    room = EngineRoom(Engine())
    assert (room.slots, room.block_size, room.is_open, room.free_blocks([])) == (4, 16, True, 20)


def test_what_the_counters_do_not_show_yet_is_taken_off_in_whole_blocks() -> None:
    room = EngineRoom(Engine(Stats(1, 2, 0, 12, 8, 0)))
    assert room.free_blocks([]) == 8
    assert room.free_blocks([1, 16, 17, 0]) == 8 - 1 - 1 - 2
    assert room.free_blocks([1000]) == 0


def test_there_is_no_room_in_an_engine_that_is_starting_again() -> None:
    assert not EngineRoom(Engine(is_restarting=True)).is_open
