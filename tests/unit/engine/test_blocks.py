"""The pool: blocks are given out once, come back once, and none is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inferq.engine.blocks import BlockPool


def test_a_pool_gives_out_each_block_once_and_all_or_none() -> None:
    pool = BlockPool(3, 16)
    first = pool.allocate(2)
    assert first is not None and len(set(first)) == 2
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 2)
    last = pool.allocate(1)
    assert last is not None and {*first, *last} == {0, 1, 2}


def test_asking_for_no_block_is_not_a_refusal() -> None:
    pool = BlockPool(1, 16)
    assert pool.allocate(1) == [0]
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None


@pytest.mark.parametrize("wrong", [[0, 0], [0, 1], [0, -1], [0, 4], [0, 2]])
def test_a_wrong_return_raises_and_changes_nothing(wrong: list[int]) -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(2) == [0, 1]
    pool.free([1])
    with pytest.raises(ValueError, match="block"):
        pool.free(wrong)
    assert (pool.num_free, pool.num_used) == (3, 1)
    pool.free([0])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_of_nothing_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        BlockPool(2, 16).allocate(-1)


class PoolMachine(RuleBasedStateMachine):
    """Random allocation and return, against a set of what is out."""

    @initialize(size=st.integers(1, 20))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size, 16)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            assert len(blocks) == count
            self.held.append(blocks)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(data=st.data())
    def free_what_is_free(self, data: st.DataObject) -> None:
        used = {block for blocks in self.held for block in blocks}
        unused = [block for block in range(self.pool.num_blocks) if block not in used]
        if unused:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.free([*used, data.draw(st.sampled_from(unused))])

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "pool"):
            out = [block for blocks in self.held for block in blocks]
            assert len(out) == len(set(out)) == self.pool.num_used
            assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


TestPool = PoolMachine.TestCase
