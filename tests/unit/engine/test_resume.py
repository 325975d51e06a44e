"""A request taken up again from its first tokens goes on as if it had never been interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tokenizers as made
from support.engines import answer, scripted_engine, until_drained
from support.fake_engine import ListSink
from support.scripted import EOS_TOKEN_ID, VOCAB_SIZE, continuation
from support.waiting import wait_until

from inferq.engine import (
    AsyncInferenceEngine,
    DuplicateRequestError,
    EngineDeadError,
    FinishReason,
    InvalidRequestError,
    RequestFailedError,
    SamplingParams,
)
from inferq.engine.admission import INLINE_TOKENS
from inferq.engine.decoders import decoder_factory
from inferq.engine.detokenizer import OutputText, Replayed
from inferq.engine.stop_strings import StopMatcher, StopStrings

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED
PROMPT = list(b"once upon a time")

# ---- text: the state after tokens is that of having pushed them ----

TOKENIZERS = {"byte_level": made.byte_level(), "llama": made.sentencepiece(), "word_piece": made.word_piece()}
ENDS = st.sampled_from([None, LENGTH, STOP])


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_text_cut_anywhere_and_replayed_is_the_text_of_one_run(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=20))
    whole = tokenizer.decode(token_ids)
    start = data.draw(st.integers(0, len(whole)))
    stop = [text for size in (1, 2, 3) if (text := whole[start : start + size])]
    include, end = data.draw(st.booleans()), data.draw(ENDS)
    cut = data.draw(st.integers(0, len(token_ids)))

    def output() -> OutputText:
        matcher = StopMatcher(StopStrings(stop), include=include)
        return OutputText(decoder_factory(tokenizer)(True), matcher, include_stop=include, stop_token_texts={})

    undisturbed, interrupted = output(), output()
    first = undisturbed.push(token_ids[:cut], None)
    replayed = interrupted.replay(token_ids[:cut], None)
    assert replayed.num_chars == len(first.text)
    if first.finish_reason is not None:
        assert replayed.end is not None
        assert (replayed.end.text, replayed.end.finish_reason) == ("", STOP)
        return
    assert replayed.end is None
    assert interrupted.push(token_ids[cut:], end) == undisturbed.push(token_ids[cut:], end)
    assert interrupted.flush() == undisturbed.flush()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("reason", [LENGTH, STOP])
@given(data=st.data())
def test_an_output_that_was_over_comes_to_the_same_text(
    include: bool, reason: FinishReason, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))

    def output() -> OutputText:
        matcher = StopMatcher(StopStrings(["ab", "é"]), include=include)
        return OutputText(decoder_factory(tokenizer)(True), matcher, include_stop=include, stop_token_texts={})

    whole = output().push(token_ids, reason)
    replayed = output().replay(token_ids, reason)
    assert replayed.end is not None
    assert replayed.end.token_ids == ()
    assert replayed.end.finish_reason == whole.finish_reason
    assert whole.text.endswith(replayed.end.text)
    assert replayed.num_chars == len(whole.text) - len(replayed.end.text)


def test_nothing_is_replayed_to_nothing() -> None:
    output = OutputText(
        decoder_factory(TOKENIZERS["byte_level"])(True),
        StopMatcher(StopStrings([]), include=False),
        include_stop=False,
        stop_token_texts={},
    )
    assert output.replay([], None) == Replayed(0, None)


# ---- the engine ----


@pytest.fixture
async def engine(cache: Path) -> AsyncIterator[AsyncInferenceEngine]:
    """Its tokens are bytes; one in nine ends a request that does not ignore it."""
    async with scripted_engine(cache, "--eos-one-in", "9", max_model_len=256) as engine:
        yield engine
        await until_drained(engine)


async def resumed(
    engine: AsyncInferenceEngine, generated: Sequence[int], sampling: SamplingParams, prompt: Sequence[int] = PROMPT
) -> ListSink:
    sink = ListSink()
    engine.submit("r", prompt, sampling, sink, generated=generated)
    assert not sink.deltas, "the sink is not called before submit returns"
    await wait_until(lambda: sink.num_ends)
    return sink


def whole_text(token_ids: Sequence[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


async def test_from_each_token_on_the_rest_is_that_of_one_run(engine: AsyncInferenceEngine) -> None:
    """With a stop string in the text, whose beginning is held back at the cut."""
    token_ids = [token for token in continuation(PROMPT, 60, eos_one_in=9)]
    text = whole_text(token_ids)
    stop = text[30:34]
    sampling = SamplingParams(max_tokens=100, ignore_eos=True, stop=(stop,))
    undisturbed = await resumed(engine, [], sampling)
    num_tokens = len(undisturbed.token_ids)
    assert undisturbed.text == text[: text.index(stop)]
    for cut in range(num_tokens):
        sink = await resumed(engine, token_ids[:cut], sampling)
        released = sum(len(delta.text) for delta in undisturbed.deltas if delta.index < cut)
        assert sink.deltas == [delta for delta in undisturbed.deltas if delta.index >= cut]
        assert sink.deltas[0].at == released
        assert sink.text == undisturbed.text[released:]
    done = await resumed(engine, token_ids[:num_tokens], sampling)
    (delta,) = done.deltas
    assert (delta.index, delta.at, delta.text, delta.token_ids) == (num_tokens, len(undisturbed.text), "", ())
    assert delta.finish_reason is STOP


async def test_max_tokens_counts_what_was_generated(engine: AsyncInferenceEngine) -> None:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    token_ids = continuation(PROMPT, 12, eos_one_in=9)
    for cut in (1, 11):
        sink = await resumed(engine, token_ids[:cut], sampling)
        assert (sink.token_ids, sink.finish_reason) == (token_ids[cut:], LENGTH)
    for generated in (token_ids, [*token_ids, 65]):
        sink = await resumed(engine, generated, sampling)
        assert [(d.index, d.token_ids, d.finish_reason) for d in sink.deltas] == [(len(generated), (), LENGTH)]


async def test_what_was_held_back_at_a_length_is_in_the_last_delta(engine: AsyncInferenceEngine) -> None:
    token_ids = list("ab é".encode())[:-1]
    sink = await resumed(engine, token_ids, SamplingParams(max_tokens=len(token_ids), stop=("b c",)))
    (delta,) = sink.deltas
    assert (delta.at, delta.text, delta.finish_reason) == (1, "b \ufffd", LENGTH)


async def test_a_context_that_is_used_up_is_a_length(engine: AsyncInferenceEngine) -> None:
    prompt = [65] * 200
    token_ids = continuation(prompt, 56, eos_one_in=9)
    sampling = SamplingParams(ignore_eos=True)
    assert (await resumed(engine, token_ids[:50], sampling, prompt)).token_ids == token_ids[50:]
    assert (await resumed(engine, token_ids, sampling, prompt)).token_ids == []


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_an_end_of_sequence_as_the_last_token_ends_it_unless_it_is_ignored(
    engine: AsyncInferenceEngine, ignore_eos: bool
) -> None:
    token_ids = continuation(PROMPT, 60, eos_one_in=9)
    num_tokens = token_ids.index(EOS_TOKEN_ID) + 1
    sampling = SamplingParams(max_tokens=60, ignore_eos=ignore_eos)
    sink = await resumed(engine, token_ids[:num_tokens], sampling)
    if ignore_eos:
        assert sink.token_ids == token_ids[num_tokens:]
    else:
        (delta,) = sink.deltas
        assert (delta.index, delta.at, delta.finish_reason) == (num_tokens, num_tokens - 1, STOP)


async def test_a_stop_token_as_the_last_token_ends_it(engine: AsyncInferenceEngine) -> None:
    generated = [65, 66, 67]
    for include, text, at in ((False, "", 2), (True, "C", 2)):
        sampling = SamplingParams(stop_token_ids=(67,), include_stop_str_in_output=include)
        (delta,) = (await resumed(engine, generated, sampling)).deltas
        assert (delta.at, delta.text, delta.finish_reason) == (at, text, STOP)


async def test_a_request_that_is_over_holds_its_id_until_its_end_is_told(engine: AsyncInferenceEngine) -> None:
    sink = ListSink()
    sampling = SamplingParams(max_tokens=2, stop=("bc",))
    engine.submit("r", PROMPT, sampling, sink, generated=list(b"ab"))
    with pytest.raises(DuplicateRequestError):
        engine.submit("r", PROMPT, SamplingParams(max_tokens=5), ListSink())
    assert engine.abort("r") is True
    assert (sink.text, sink.finish_reason) == ("b", LENGTH), "it ended before it was aborted"
    await engine.complete("other", sampling=SamplingParams(max_tokens=1))
    assert sink.num_ends == 1


async def test_an_abort_after_a_resume_gives_what_is_held_back(engine: AsyncInferenceEngine) -> None:
    sink = ListSink()
    sampling = SamplingParams(max_tokens=100, stop=("xyz",))
    engine.submit("r", PROMPT, sampling, sink, generated=list(b"wxy"))
    engine.abort("r")
    (delta,) = sink.deltas
    assert (delta.index, delta.at, delta.text, delta.finish_reason) == (3, 1, "xy", CANCELLED)


# ---- a long output of an earlier run: its text is worked out in a thread ----

LONG = INLINE_TOKENS + 1


class SlowText:
    """Holds up the decoders of long outputs until it is told to let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[int] = set()
        self._let_go = threading.Event()
        replay = OutputText.replay

        def waits(output: OutputText, token_ids: Sequence[int], reason: FinishReason | None) -> Replayed:
            self.threads.add(threading.get_ident())
            if len(token_ids) >= LONG:
                assert self._let_go.wait(30)
            return replay(output, token_ids, reason)

        monkeypatch.setattr(OutputText, "replay", waits)

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
async def roomy(cache: Path) -> AsyncIterator[AsyncInferenceEngine]:
    async with scripted_engine(cache, max_model_len=4 * LONG) as engine:
        yield engine
        await until_drained(engine)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowText]:
    slow = SlowText(monkeypatch)
    yield slow
    slow.let_go()


def resume_long(engine: AsyncInferenceEngine, *, more: int = 5, stop: tuple[str, ...] = ()) -> ListSink:
    sink = ListSink()
    sampling = SamplingParams(max_tokens=LONG + more, ignore_eos=True, stop=stop)
    engine.submit("r", PROMPT, sampling, sink, generated=continuation(PROMPT, LONG))
    return sink


async def test_the_loop_goes_on_while_a_thread_works_out_the_text(roomy: AsyncInferenceEngine, slow: SlowText) -> None:
    sink = resume_long(roomy)
    assert (await roomy.complete("other", sampling=SamplingParams(max_tokens=3))).token_ids
    assert not sink.deltas
    with pytest.raises(DuplicateRequestError):
        roomy.submit("r", PROMPT, SamplingParams(), ListSink())
    slow.let_go()
    await wait_until(lambda: sink.num_ends)
    whole = continuation(PROMPT, LONG + 5)
    assert sink.token_ids == whole[LONG:]
    assert (sink.deltas[0].index, sink.deltas[0].at) == (LONG, len(whole_text(whole[:LONG])))
    assert len(slow.threads - {threading.get_ident()}) == 1, "one for the long one, and the loop's for the others"


async def test_an_abort_meanwhile_ends_it_where_the_earlier_run_was(
    roomy: AsyncInferenceEngine, slow: SlowText
) -> None:
    token_ids = continuation(PROMPT, LONG)
    text = whole_text(token_ids)
    stop = text[-2:] + "\0"  # its beginning is held back
    sink = resume_long(roomy, stop=(stop,))
    freed = roomy.freed("r")
    assert roomy.abort("r")
    assert not roomy.abort("r")
    assert not sink.deltas
    following = ListSink()
    roomy.submit("r", PROMPT, SamplingParams(max_tokens=2), following)  # the id is free at once
    await wait_until(lambda: following.num_ends)
    assert not sink.deltas
    slow.let_go()
    await wait_until(lambda: sink.num_ends)
    (delta,) = sink.deltas
    assert (delta.index, delta.at, delta.text) == (LONG, len(text) - 2, text[-2:])
    assert delta.finish_reason is CANCELLED
    await freed
    assert roomy.stats is not None and roomy.stats.step == 2, "the steps of the other one"


async def test_a_pause_meanwhile_holds(roomy: AsyncInferenceEngine, slow: SlowText) -> None:
    sink = resume_long(roomy)
    roomy.pause("r")
    slow.let_go()
    await wait_until(lambda: not _resuming())
    await roomy.complete("other", sampling=SamplingParams(max_tokens=3))
    assert not sink.deltas
    roomy.resume("r")
    await wait_until(lambda: sink.num_ends)
    assert sink.finish_reason is LENGTH


@pytest.mark.parametrize("aborted", [False, True])
async def test_one_that_was_over_is_told_so(roomy: AsyncInferenceEngine, slow: SlowText, aborted: bool) -> None:
    sink = resume_long(roomy, more=0)
    if aborted:
        roomy.abort("r")
    slow.let_go()
    await wait_until(lambda: sink.num_ends)
    (delta,) = sink.deltas
    assert (delta.index, delta.token_ids, delta.finish_reason) == (LONG, (), LENGTH)


async def test_the_end_of_the_engine_meanwhile_is_the_requests(cache: Path, slow: SlowText) -> None:
    async with scripted_engine(cache, max_model_len=4 * LONG) as engine:
        sink = resume_long(engine)
        await engine.stop()
        assert [type(error) for error in sink.errors] == [EngineDeadError]
        slow.let_go()
        await wait_until(lambda: not _resuming())
        assert sink.num_ends == 1
        assert engine.idle


async def test_text_that_cannot_be_worked_out_fails_that_request_alone(
    roomy: AsyncInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(output: OutputText, token_ids: Sequence[int], reason: FinishReason | None) -> Replayed:
        raise ValueError("the detokenizer broke")

    with monkeypatch.context() as patched:
        patched.setattr(OutputText, "replay", broken)
        sink = resume_long(roomy)
        await wait_until(lambda: sink.num_ends)
    assert [type(error) for error in sink.errors] == [RequestFailedError]
    assert (await roomy.complete("other", sampling=SamplingParams(max_tokens=3))).token_ids


def _resuming() -> bool:
    return any(task.get_name() == "inferq-resume" for task in asyncio.all_tasks())


@pytest.mark.parametrize("generated", [[-1], [VOCAB_SIZE], [1.0], ["a"], [True]])
async def test_what_is_no_token_is_refused(engine: AsyncInferenceEngine, generated: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="the generated tokens"):
        engine.submit("r", PROMPT, SamplingParams(max_tokens=100), ListSink(), generated=generated)
    assert engine.num_requests == 0


async def test_resumed_requests_run_beside_new_ones(cache: Path) -> None:
    async with scripted_engine(cache, "--step-ms", "1", num_blocks=40, max_num_seqs=4) as engine:
        sinks = {}
        for number in range(12):
            prompt = f"prompt {number}"
            tokens = continuation(list(prompt.encode()), 60)
            sinks[prompt] = ListSink()
            sampling = SamplingParams(max_tokens=60)
            cut = 5 * number
            engine.submit(prompt, list(prompt.encode()), sampling, sinks[prompt], generated=tokens[:cut])
        await wait_until(lambda: all(sink.num_ends for sink in sinks.values()))
        for number, (prompt, sink) in enumerate(sinks.items()):
            assert sink.text == answer(prompt, 60)[5 * number :]
        await until_drained(engine)
