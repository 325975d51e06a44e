"""What tests of an engine that restarts share: how patient it is, the death of its child, and all its answers."""

from __future__ import annotations

from dataclasses import replace

from inferq.engine import AsyncInferenceEngine, RestartPolicy
from support.engines import answer, child_of, up_to
from support.fake_engine import ListSink
from support.waiting import wait_until

#: For whatever is not about a hang.
PATIENT = RestartPolicy(backoff_seconds=0, step_timeout_seconds=None)
WATCHFUL = replace(PATIENT, step_timeout_seconds=1.5)


def is_up(engine: AsyncInferenceEngine) -> bool:
    """There is a child, even if it works for one suspect alone."""
    return engine._tracker._placement._up


async def until_down(engine: AsyncInferenceEngine) -> None:
    """Kill the child, and wait for the news."""
    child_of(engine).kill()
    await wait_until(lambda: not is_up(engine), what="the child's death is known")
    assert engine.is_restarting


def submit(engine: AsyncInferenceEngine, prompt: str, num_tokens: int) -> ListSink:
    sink = ListSink()
    engine.submit(prompt, list(prompt.encode()), up_to(num_tokens), sink)
    return sink


def num_tokens(sinks: dict[str, ListSink]) -> int:
    return sum(len(sink.token_ids) for sink in sinks.values())


async def all_answered(sinks: dict[str, ListSink], num_tokens: int) -> None:
    await wait_until(lambda: all(sink.num_ends for sink in sinks.values()), what="every request has ended")
    for prompt, sink in sinks.items():
        assert (sink.text, sink.num_ends) == (answer(prompt, num_tokens), 1)
        sink.check_contiguous()
