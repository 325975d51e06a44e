"""What is wrong with a request is said by name, before the child hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted import EOS_TOKEN_ID, VOCAB_SIZE, text_folder

from inferq.engine.admission import Admission, Prompt
from inferq.engine.errors import InvalidRequestError, SlowTemplateError
from inferq.engine.pipe import Ready
from inferq.engine.request import SamplingParams
from inferq.engine.text import TextProcessor

LIMIT = 64
FACTS = Ready("m", "", [EOS_TOKEN_ID], VOCAB_SIZE, LIMIT, 100, 16, 8, 128, "float32", "cpu", "none")


@pytest.fixture(scope="module")
def admission(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admission]:
    folder: Path = text_folder(str(tmp_path_factory.mktemp("text")))
    yield Admission(FACTS, TextProcessor.load(folder))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({}, "exactly one of prompt, prompt_token_ids and messages must be given, not 0"),
        ({"text": "a", "token_ids": [1]}, "not 2"),
        ({"text": "a", "token_ids": [1], "messages": [{"role": "user", "content": "a"}]}, "not 3"),
        ({"text": ""}, "empty"),
        ({"token_ids": []}, "empty"),
        ({"messages": []}, "empty"),
    ],
)
def test_a_prompt_is_exactly_one_thing_and_not_empty(prompt: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        Prompt(**prompt)


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        ([-1], f"token id -1 in the prompt is outside the vocabulary of {VOCAB_SIZE}"),
        ([VOCAB_SIZE], f"token id {VOCAB_SIZE} in the prompt is outside"),
        ([5, 2**63, 7], f"token id {2**63} in the prompt is outside"),
        ([5, -(2**70)], "outside"),
        ([5, 1 << 20000], "token id of too many digits in the prompt is outside"),
        (["5"], "the prompt must be integers"),
        ([True], "the prompt must be integers"),
        ([1.0], "the prompt must be integers"),
        ([None], "the prompt must be integers"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(admission: Admission, token_ids: list[Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        admission.admit(token_ids, SamplingParams())


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, "x"])
def test_stop_token_ids_outside_the_vocabulary_are_refused(admission: Admission, token_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        admission.admit([1], SamplingParams(stop_token_ids=(token_id,)))


@pytest.mark.parametrize("num_tokens", [LIMIT, LIMIT + 1, 10 * LIMIT])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(admission: Admission, num_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{num_tokens} tokens, and max_model_len is {LIMIT}"):
        admission.admit([1] * num_tokens, SamplingParams())


def test_a_prompt_that_leaves_one_token_is_taken(admission: Admission) -> None:
    assert admission.admit([1] * (LIMIT - 1), SamplingParams()).sampling["max_tokens"] is None
    assert admission.admit([1] * (LIMIT - 1), SamplingParams(max_tokens=1)).sampling["max_tokens"] == 1


def test_prompt_and_max_tokens_over_the_context_are_refused_with_all_counts(admission: Admission) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"8 tokens and max_tokens is 57, together 65, over max_model_len {LIMIT}"
    ):
        admission.admit([1] * 8, SamplingParams(max_tokens=57))
    admission.admit([1] * 8, SamplingParams(max_tokens=56))


def test_stop_strings_that_are_special_tokens_stop_by_their_ids_too(admission: Admission) -> None:
    sampling = SamplingParams(stop=("<|im_end|>", "text"), stop_token_ids=(65,), ignore_eos=True, seed=3, top_k=7)
    assert admission.admit([1], sampling).sampling == {
        "max_tokens": None,
        "temperature": 1.0,
        "top_k": 7,
        "top_p": 1.0,
        "seed": 3,
        "stop_token_ids": [65, EOS_TOKEN_ID],
        "ignore_eos": True,
    }


class Recorder:
    """A text side that notes in which thread it was asked to tokenize."""

    max_token_chars = 100

    def __init__(self) -> None:
        self.threads: list[bool] = []

    def encode(self, prompt: str) -> list[int]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        return [len(prompt)]

    def encode_chat(self, messages: Any, *, limit_seconds: float | None) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_prompt_is_tokenized_in_a_thread_and_one_that_cannot_fit_not_at_all(chat: bool) -> None:
    text = Recorder()
    admission = Admission(FACTS, text)  # type: ignore[arg-type]

    def prompt(num_chars: int) -> Prompt:
        content = "x" * num_chars
        return Prompt(messages=[{"role": "user", "content": content}]) if chat else Prompt(content)

    await admission.tokenize(prompt(100))
    await admission.tokenize(prompt(5000))
    assert text.threads == [True, False]
    with pytest.raises(InvalidRequestError, match=f"characters: max_model_len {LIMIT} is over before them"):
        await admission.tokenize(prompt(LIMIT * text.max_token_chars + 1))
    assert len(text.threads) == 2


def test_the_size_of_a_chat_is_that_of_all_its_texts() -> None:
    parts = [{"type": "text", "text": "xy"}, {"type": "text", "text": "z"}]
    messages = [{"role": "user", "content": parts}, {"role": "a", "content": None, "n": 3}]
    assert Prompt(messages=messages).num_chars == len("user" + "text" + "xy" + "text" + "z" + "a")


async def test_a_chat_of_many_values_without_text_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may walk through all of them, which must not hold up the event loop."""
    rendered_in: list[int] = []

    class Text:
        max_token_chars = 8

        def encode_chat(self, messages: object, *, limit_seconds: float | None) -> list[int]:
            rendered_in.append(threading.get_ident())
            return [1]

    admission = Admission(FACTS, Text())  # type: ignore[arg-type]
    for calls in ([], [[]] * 5000):
        await admission.tokenize(Prompt(messages=[{"role": "user", "content": "x", "tool_calls": calls}]))
    assert [ident == threading.get_ident() for ident in rendered_in] == [True, False]


async def test_one_long_prompt_at_a_time_is_tokenized_and_a_short_one_does_not_wait() -> None:
    """Threads that tokenize at once would fight the event loop for the interpreter."""
    at_work, most, go_on = 0, 0, threading.Event()

    class Text:
        max_token_chars = 1000

        def encode(self, prompt: str) -> list[int]:
            nonlocal at_work, most
            if len(prompt) > 100:
                at_work += 1
                most = max(most, at_work)
                go_on.wait()
                at_work -= 1
            return [len(prompt)]

    admission = Admission(FACTS, Text())  # type: ignore[arg-type]
    long = [asyncio.create_task(admission.tokenize(Prompt("x" * 5000))) for _ in range(4)]
    await asyncio.sleep(0)
    long[0].cancel()  # its thread goes on, and the next one waits for it all the same
    assert await admission.tokenize(Prompt("short")) == [5]
    go_on.set()
    assert await asyncio.gather(*long[1:]) == [[5000]] * 3
    assert most == 1


async def test_a_short_chat_with_a_slow_template_is_rendered_in_the_thread() -> None:
    limits: list[float | None] = []

    class Text:
        max_token_chars = 1000

        def encode_chat(self, messages: object, *, limit_seconds: float | None) -> list[int]:
            limits.append(limit_seconds)
            if limit_seconds is not None:
                raise SlowTemplateError("too slow")
            assert threading.current_thread() is not threading.main_thread()
            return [1]

    admission = Admission(FACTS, Text())  # type: ignore[arg-type]
    for _ in range(2):
        assert await admission.tokenize(Prompt(messages=[{"content": "x"}])) == [1]
    assert limits[0] is not None
    assert limits[1:] == [None, None], "and the next chat is not tried in the event loop again"


def odd_chats() -> dict[str, list[Any]]:
    cyclic: dict[str, Any] = {"role": "user"}
    cyclic["content"] = [cyclic]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return {
        "cyclic": [cyclic],
        "deep": [{"role": "user", "content": deep}],
        "tuple as a key": [{"role": "user", ("a", "b"): "c"}],
        "object as a key": [{"role": "user", object(): "c"}],
        "object as a value": [{"role": "user", "content": object()}],
        "huge number": [{"role": "user", "content": 10**5000}],
        "too many values": [{"role": "user", "content": [[]] * 2_000_001}],
    }


@pytest.mark.parametrize("name", odd_chats())
async def test_a_chat_that_is_not_json_is_the_requests_own_fault(admission: Admission, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        await admission.tokenize(Prompt(messages=odd_chats()[name]))


@pytest.mark.parametrize("fields", [{"text": 5}, {"token_ids": 5}, {"messages": iter([])}, {"text": ["a"]}])
def test_a_prompt_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be of type"):
        Prompt(**fields)
