"""The memory of a step's arrays on a device that has memory of its own: here another part of the host's."""

from __future__ import annotations

import pytest
import torch

from inferq.engine.step_buffers import StepBuffers

SHAPES = {
    "ids": ((5,), torch.int64),
    "lens": ((3,), torch.int32),
    "temperature": ((3,), torch.float32),
    "tables": ((4, 3), torch.int32),
}
CPU = torch.device("cpu")


def filled(buffers: StepBuffers, value: int) -> None:
    for array in buffers.next_arrays().values():
        array[...] = value


def test_on_a_cpu_what_is_filled_is_what_is_read() -> None:
    buffers = StepBuffers(SHAPES, CPU, separate=False)
    filled(buffers, 7)
    assert all((tensor == 7).all() for tensor in buffers.device.values())
    assert {name: (tuple(t.shape), t.dtype) for name, t in buffers.device.items()} == SHAPES


def test_what_is_sent_arrives_and_of_the_table_the_rows_in_use() -> None:
    buffers = StepBuffers(SHAPES, CPU, separate=True)
    filled(buffers, 7)
    assert all((tensor == 0).all() for tensor in buffers.device.values())
    buffers.send(num_rows=2)
    for name in ("ids", "lens", "temperature"):
        assert (buffers.device[name] == 7).all()
    assert buffers.device["tables"].tolist() == [[7] * 3] * 2 + [[0] * 3] * 2


def test_one_set_is_filled_while_the_other_may_be_on_its_way() -> None:
    buffers = StepBuffers(SHAPES, CPU, separate=True)
    filled(buffers, 1)
    first = buffers.array
    filled(buffers, 2)
    assert all((array == 1).all() for array in first.values())
    filled(buffers, 3)  # the first set's copy is done by now
    assert all((array == 3).all() for array in first.values())
    buffers.send(num_rows=4)
    assert all((tensor == 3).all() for tensor in buffers.device.values())


@pytest.mark.parametrize("separate", [False, True])
def test_arrays_begin_at_multiples_of_16_bytes_and_stay(separate: bool) -> None:
    buffers = StepBuffers(SHAPES, CPU, separate=separate)
    addresses = [tensor.data_ptr() for tensor in buffers.device.values()]
    filled(buffers, 1)
    buffers.send(num_rows=1)
    assert [tensor.data_ptr() for tensor in buffers.device.values()] == addresses
    assert all((address - addresses[0]) % 16 == 0 for address in addresses)
