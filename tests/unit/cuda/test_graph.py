"""The order in which graphs are recorded and replayed, and what is left when a recording fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda

from inferq.cuda.graph import BrokenDeviceError, GraphRecorder

GPU = torch.device("cuda")


@pytest.fixture(params=[False, True], ids=["torch that recovers", "torch that breaks"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(breaks=request.param).install(monkeypatch)


def step(cuda: FakeCuda, name: str = "step") -> Callable[[], None]:
    return lambda: cuda.launch(name)


def test_it_runs_twice_and_is_recorded_on_a_stream_of_its_own_that_waits_and_is_waited_for(cuda: FakeCuda) -> None:
    replay = GraphRecorder(GPU)(step(cuda))
    assert cuda.log == [
        "side 1 waits for default",
        "step on side 1",
        "step on side 1",
        "synchronize",
        "recording on side 1",
        "recorded",
        "default waits for side 1",
    ]
    assert cuda.current is cuda.default
    cuda.log.clear()
    replay()
    replay()
    assert cuda.log == ["step on default"] * 2


def test_the_graphs_of_a_recorder_share_a_stream_and_a_pool(cuda: FakeCuda) -> None:
    record = GraphRecorder(GPU)
    replays = [record(step(cuda, name)) for name in ("large", "small")]
    assert {line for line in cuda.log if line.startswith("recording")} == {"recording on side 1"}
    assert len(cuda.pools) == 1
    cuda.log.clear()
    for replay in replays:
        replay()
    assert cuda.log == ["large on default", "small on default"]


def test_a_pool_whose_graphs_are_gone_is_not_opened_again(cuda: FakeCuda) -> None:
    record = GraphRecorder(GPU)
    record(step(cuda))
    gc.collect()
    kept = record(step(cuda))
    record(step(cuda))
    assert len(cuda.pools) == 2
    kept()


def waiting(cuda: FakeCuda) -> Callable[[], None]:
    def run() -> None:
        cuda.launch("step")
        cuda.wait()

    return run


def failing(cuda: FakeCuda) -> Callable[[], None]:
    def run() -> None:
        raise RuntimeError("out of resource: shared memory")

    return run


def hidden(cuda: FakeCuda) -> Callable[[], None]:
    """What ends a recording, as `waiting` does, but says nothing itself."""

    def run() -> None:
        with suppress(RuntimeError):
            cuda.wait()

    return run


@pytest.mark.parametrize(
    ("step", "says"), [(waiting, "not permitted when stream is capturing"), (hidden, "previous error during capture")]
)
def test_a_recording_that_fails_leaves_the_current_stream_and_says_whether_the_device_can_be_used(
    step: Callable[[FakeCuda], Callable[[], None]], says: str, cuda: FakeCuda
) -> None:
    with pytest.raises((RuntimeError, BrokenDeviceError)) as caught:
        GraphRecorder(GPU)(step(cuda))
    assert cuda.current is cuda.default
    assert cuda.log[-1] == "default waits for side 1"
    assert isinstance(caught.value, BrokenDeviceError) == cuda.breaks
    told: Any = caught.value.__cause__ if cuda.breaks else caught.value
    assert says in str(told)


def test_what_fails_before_it_is_recorded_breaks_nothing(cuda: FakeCuda) -> None:
    record = GraphRecorder(GPU)
    with pytest.raises(RuntimeError, match="shared memory"):
        record(failing(cuda))
    assert cuda.current is cuda.default
    record(step(cuda))()


def test_after_a_failure_that_breaks_nothing_the_recorder_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    record = GraphRecorder(GPU)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        record(waiting(cuda))
    gc.collect()
    record(step(cuda))()
    assert cuda.log[-1] == "step on default"
