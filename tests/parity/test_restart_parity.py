"""The real model in the real child, in float32: a death in mid-stream changes no token of anybody's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from support.engines import child_of, until_drained
from support.fake_engine import ListSink
from support.waiting import wait_until

from inferq.engine import AsyncInferenceEngine, EngineConfig, RestartPolicy, SamplingParams

NUM_TOKENS = 40
PROMPTS = [
    "The old lighthouse keeper",
    "def add(a, b):",
    "In 1969 a man",
    "Zażółć gęślą jaźń 🦙",
]
CONFIG = EngineConfig(model="demo", dtype="float32", max_model_len=1024, max_num_seqs=4, threads=1)


def sampling(number: int) -> SamplingParams:
    """Every other one greedy, the others sampled with a seed of their own."""
    temperature = 0.0 if number % 2 else 0.8
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, top_p=0.95, seed=number, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed() -> list[ListSink]:
    """The answers of an engine that nothing happens to."""

    async def generate() -> list[ListSink]:
        async with AsyncInferenceEngine(CONFIG) as engine:
            sinks = submit_all(engine, {})
            await wait_until(lambda: all(sink.num_ends for sink in sinks), timeout=100)
            return sinks

    return asyncio.run(generate())


@pytest.fixture
async def engine() -> AsyncIterator[AsyncInferenceEngine]:
    async with AsyncInferenceEngine(CONFIG, restart=RestartPolicy()) as engine:
        yield engine
        await until_drained(engine)


def submit_all(engine: AsyncInferenceEngine, generated: dict[int, tuple[int, ...]]) -> list[ListSink]:
    sinks = []
    for number, prompt in enumerate(PROMPTS):
        sinks.append(ListSink())
        token_ids = engine.text.encode(prompt)
        done = generated.get(number, ())
        engine.submit(f"r{number}", token_ids, sampling(number), sinks[-1], generated=done)
    return sinks


def all_ended(sinks: list[ListSink]) -> Callable[[], bool]:
    return lambda: all(sink.num_ends for sink in sinks)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kill_9_of_the_child_in_mid_stream_changes_no_token(
    undisturbed: list[ListSink], engine: AsyncInferenceEngine
) -> None:
    sinks = submit_all(engine, {})
    await wait_until(lambda: sum(len(sink.token_ids) for sink in sinks) > 40, timeout=100)
    child_of(engine).kill()
    await wait_until(all_ended(sinks), timeout=200)
    assert engine.num_restarts == 1
    for sink, whole in zip(sinks, undisturbed, strict=True):
        sink.check_contiguous()
        assert (sink.token_ids, sink.text) == (whole.token_ids, whole.text)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_requests_taken_up_from_any_token_go_on_with_the_same_tokens_and_text(
    undisturbed: list[ListSink], engine: AsyncInferenceEngine
) -> None:
    cuts = {number: 1 + 8 * number for number in range(len(PROMPTS))}
    sinks = submit_all(engine, {number: tuple(undisturbed[number].token_ids[:cut]) for number, cut in cuts.items()})
    await wait_until(all_ended(sinks), timeout=200)
    for number, (sink, whole) in enumerate(zip(sinks, undisturbed, strict=True)):
        first = sink.deltas[0]
        assert first.index == cuts[number]
        assert first.at == sum(len(delta.text) for delta in whole.deltas if delta.index < cuts[number])
        assert sink.token_ids == whole.token_ids[cuts[number] :]
        assert whole.text[: first.at] + sink.text == whole.text
