"""The pool of KV cache blocks, as numbers: who may write into which is decided here, once.

It knows neither tensors nor sequences. A block is free or used; what is given back twice, or was never given out, is
a bug of ours that would let two sequences write into one block, so it raises. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0, each for the KV entries of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last in, first out: the block given back last is the likeliest to be in a cache of the hardware.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None where fewer are free; never some of them. Raises ValueError for less than none."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._used[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises ValueError, with nothing changed, if one of them is not in use."""
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is given back twice at once: {list(blocks)}")
        for block in blocks:
            if not (0 <= block < self.num_blocks and self._used[block]):
                raise ValueError(f"block {block} is not in use")
        for block in blocks:
            self._used[block] = 0
        self._free.extend(reversed(blocks))
