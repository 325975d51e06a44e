"""The stand-in for a graph finds what a graph would get wrong, and lets through what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.recorded import RerunRecorder

X = torch.ones(4)
IDS = torch.tensor([0, 1])


@pytest.mark.parametrize("fault", ["another buffer", "another length", "a number from the host"])
def test_what_was_true_when_it_was_recorded_and_is_not_any_more(fault: str) -> None:
    state: dict[str, Any] = {"x": torch.zeros(4), "rows": 4, "factor": 2.0}

    def run() -> None:
        x = state["x"][: state["rows"]]
        (x * state["factor"]).add_(1)

    replay = RerunRecorder()(run)
    replay()
    state["x"].fill_(7)  # what is in it may change
    replay()
    change = {"another buffer": {"x": torch.zeros(4)}, "another length": {"rows": 3}}.get(fault, {"factor": 3.0})
    first = state["x"]  # held, so that the other one is elsewhere
    state.update(change)
    with pytest.raises(AssertionError, match="a replay would"):
        replay()
    assert first.shape == (4,)


def write(place: Any, value: Any) -> Callable[[], None]:
    return lambda: X.clone().__setitem__(place, value)


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "a condition": lambda: bool((X > 0).all()),
    "an int": lambda: int(IDS[1]),
    "an index": lambda: [5, 6][IDS[0]],
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu"),
    "to cpu and another type": lambda: X.to("cpu", torch.float64),
    "to the device cpu": lambda: X.to(device="cpu"),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "repr": lambda: repr(X),
    "format": lambda: f"{X[0]}",
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 0),
    "masked_select": lambda: X.masked_select(X > 0),
    "read by a mask": lambda: X[X > 0],
    "write by a mask": lambda: write(X > 5, 0.0)(),
    "write a tensor by a mask": lambda: write(X > 0, X * 2)(),
    "unique": lambda: torch.unique(X),
    "unique in order": lambda: torch.unique_consecutive(X),
    "unique rows": lambda: torch.unique(X.view(2, 2), dim=0),
    "bincount": lambda: torch.bincount(IDS),
    "repeat_interleave": lambda: torch.repeat_interleave(X, torch.ones_like(X, dtype=torch.int64)),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "tensor of a number": lambda: torch.tensor(1.0, device=X.device),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "new_tensor": lambda: X.new_tensor([1.0, 2.0]),
    "from_numpy": lambda: torch.from_numpy(np.ones(4)),
    "read by a list": lambda: X[[0, 1]],
    "write by a list": lambda: write([0, 1], 0.0)(),
    "made on the host": lambda: X.clone().copy_(torch.arange(4.0)),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_what_would_wait_for_the_device_is_refused(wait: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match=r"wait for the device|on the host"):
        RerunRecorder()(lambda: (X.add(1), wait()))


RIGHT: dict[str, Callable[[], Any]] = {
    "its own device": lambda: X.to(X.device, torch.float64),
    "a type": lambda: X.to(torch.float64),
    "an element": lambda: X[1],
    "a part": lambda: X[1:3],
    "an index on the device": lambda: X[IDS],
    "write a number": lambda: write(1, 0.0)(),
    "write by an index": lambda: write(IDS, 0.0)(),
    "a known repetition": lambda: X.repeat_interleave(2),
    "repetitions of a known sum": lambda: torch.repeat_interleave(X, torch.ones_like(IDS.repeat(2)), output_size=4),
    "made on the device": lambda: torch.arange(4, device=X.device),
    "made like another": lambda: torch.zeros_like(X).fill_(2.0),
    "a mask that keeps the shape": lambda: torch.where(X > 0, X, 0.0).masked_fill(X > 5, 1.0),
}


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT.keys())
def test_what_waits_for_nothing_is_let_through(right: Callable[[], Any]) -> None:
    RerunRecorder()(lambda: (X.add(1), right()))()
