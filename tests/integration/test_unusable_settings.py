"""A setting that only the engine's process finds to be wrong: one line that names it, and exit code 2."""

from __future__ import annotations

import pytest
import torch
from support.processes import start_worker

from inferq.worker.main import Exit

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        pytest.param(["--model", "/nowhere/at/all"], "--model: there is no folder /nowhere/at/all", id="model"),
        pytest.param(
            ["--cache-dir", "~nosuchuser/x"],
            "--cache-dir: there is no cache folder: nobody here has the home of ~nosuchuser/x",
            id="cache",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--device", "cuda"],
            "--device: device cuda was asked for, and torch finds no CUDA device here",
            id="device",
            marks=[NO_GPU, pytest.mark.slow],
        ),
        pytest.param(
            ["--attention", "flash", "--device", "cpu"],
            "--attention: attention 'flash' cannot be had: the device is a CPU; use --attention auto or torch",
            id="attention",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_it_is_refused_in_one_line(redis_url: str, flags: list[str], line: str) -> None:
    with start_worker(redis_url, *flags) as worker:
        assert await worker.wait(240) == Exit.USAGE
        assert [each for each in worker.log.splitlines() if not each.startswith("{")] == [f"inferq-worker: {line}"]
        assert "critical" not in worker.log and "error" not in worker.log


async def test_an_engine_that_cannot_start_for_another_reason_is_none(redis_url: str) -> None:
    with start_worker(redis_url, environment={"INFERQ_ENGINE_COMMAND": "/bin/false"}) as worker:
        assert await worker.wait(60) == Exit.BROKEN
        assert "engine.unusable" in worker.log
