"""How many blocks a claim may count on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from inferq.engine.blocks import BlockPool
from inferq.engine.errors import InvalidRequestError
from inferq.engine.pipe import Ready, Stats
from inferq.engine.scheduler import Scheduler
from inferq.engine.sequence import Sequence, SequenceSampling
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
    assert room.free_blocks([100, 100]) == 0


@pytest.mark.parametrize(
    ("context", "blocks", "largest"), [(100, 20, 100), (96, 6, 96), (97, 6, 97), (98, 6, 97), (10**6, 20, 321)]
)
def test_the_largest_request_fits_the_context_and_the_pool(context: int, blocks: int, largest: int) -> None:
    room = EngineRoom(Engine(facts=Ready(**(FACTS | {"max_model_len": context, "num_blocks": blocks}))))
    assert room.largest_request == largest


def test_the_pool_takes_the_largest_request_and_none_that_has_one_token_more() -> None:
    room = EngineRoom(Engine(facts=Ready(**(FACTS | {"max_model_len": 10**6}))))
    scheduler = Scheduler(BlockPool(FACTS["num_blocks"], room.block_size), max_num_seqs=2, max_num_batched_tokens=64)
    scheduler.add(Sequence(1, [0], 1, SequenceSampling(max_tokens=room.largest_request - 1)))
    with pytest.raises(InvalidRequestError):
        scheduler.add(Sequence(2, [0], 1, SequenceSampling(max_tokens=room.largest_request)))


def test_what_seems_to_be_over_the_largest_request_has_the_blocks_of_the_largest() -> None:
    room = EngineRoom(Engine())
    assert room.free_blocks([100]) == 20 - 7
    assert room.free_blocks([10**9, 17]) == 20 - 7 - 2
    assert room.free_blocks([101, 10**9, 17]) == 20 - 7 - 7 - 2


def test_there_is_no_room_in_an_engine_that_is_starting_again() -> None:
    assert not EngineRoom(Engine(is_restarting=True)).is_open
