"""What the suites of the publisher share: outboxes that note what they say, and deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import Finished, FinishReason
from inferq.worker.outbox import Outbox
from inferq.worker.publisher import Publisher

from .scripted_redis import ScriptedRedis

FINISHED = Finished(finish_reasons=(FinishReason.STOP,))


def outbox(request_id: str = "a", *, max_unsent_tokens: int = 1000) -> tuple[Outbox, list[object]]:
    """An outbox, and what it said: True and False for pressure, why it is lost, and "stuck"."""
    said: list[object] = []
    box = Outbox(
        request_id=request_id,
        token="token",
        generation=1,
        epoch=7,
        max_unsent_tokens=max_unsent_tokens,
        on_pressure=said.append,
        on_lost=said.append,
        on_stuck=lambda reason: said.append(reason or "stuck"),
    )
    return box, said


@asynccontextmanager
async def running(redis: ScriptedRedis) -> AsyncIterator[Publisher]:
    publisher = Publisher(redis)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pieces(texts: Sequence[str]) -> list[EngineDelta]:
    """One delta a text, with as many token ids as it has characters."""
    deltas, index = [], 0
    for text in texts:
        deltas.append(EngineDelta(index, index, text, tuple(range(index, index + len(text)))))
        index += len(text)
    return deltas
