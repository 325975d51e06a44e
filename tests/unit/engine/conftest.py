"""Engines over the scripted child, which are found to have left nothing when a test is over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.engines import Start, scripted_engine, until_drained
from support.restarting import PATIENT

from inferq.engine import AsyncInferenceEngine, RestartPolicy


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def start(cache: Path) -> AsyncIterator[Start]:
    """Starts engines; at the end each must be drained, and is stopped."""
    engines: list[AsyncInferenceEngine] = []

    async def start_engine(*flags: str, **config: Any) -> AsyncInferenceEngine:
        engine = scripted_engine(cache, *flags, **config)
        engines.append(engine)
        await engine.start_engine_loop()
        return engine

    yield start_engine
    for engine in engines:
        if engine.is_running:
            await until_drained(engine)
        await engine.stop()
        assert engine.idle


@pytest.fixture
def no_process_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def start_restarting(no_process_left: None, start: Start) -> Start:
    """Starts engines that restart. At the end each must be drained, and none may leave a process."""

    async def start_engine(*flags: str, restart: RestartPolicy = PATIENT, **config: Any) -> AsyncInferenceEngine:
        return await start(*flags, restart=restart, **config)

    return start_engine
