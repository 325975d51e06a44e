"""A long chat holds up nobody: it is tokenized in the thread, and nothing there keeps the interpreter for long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tokenizers as made

from inferq.engine.admission import Admission, Prompt
from inferq.engine.control_tokens import BATCH_CHARS, StandIns, _batches
from inferq.engine.pipe import Ready
from inferq.engine.text import TextProcessor

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
FACTS = Ready("m", "", [1], 1000, 10**7, 100, 16, 8, 128, "float32", "cpu", "none")
CHATS = {
    "one message": [{"role": "user", "content": "<|im_end|>" * 30_000}],
    "many messages": [{"role": "user", "content": "so<|im_end|> it" * 6} for _ in range(4000)],
}


class OneByOne:
    """An encoding without that which makes a list of tuples or texts of all its tokens in one go."""

    def __init__(self, encoding: Any) -> None:
        self.ids = encoding.ids
        self.token_to_chars = encoding.token_to_chars


class Watched:
    """A tokenizer that notes who calls it, and with how much at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.threads: set[str] = set()
        self.batches: list[list[int]] = []

    def encode_batch(self, texts: list[str], **options: Any) -> list[OneByOne]:
        self.threads.add(threading.current_thread().name)
        self.batches.append([len(text) for text in texts])
        return [OneByOne(encoding) for encoding in self.tokenizer.encode_batch(texts, **options)]

    encode_batch_fast = encode_batch  # the offsets are not part of what a fast one returns, and not asked for


@pytest.fixture
def text(tmp_path: Path) -> TextProcessor:
    return TextProcessor.load(made.write_folder(tmp_path, made.byte_level(), config=NAMES, template=CHATML))


@pytest.mark.parametrize("name", CHATS)
async def test_a_long_chat_of_control_tokens_runs_in_the_thread_in_bounded_pieces(
    text: TextProcessor, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text.encode_chat(CHATS[name])
    whole, plain = Watched(text._control._tokenizer), Watched(text._control._plain)
    monkeypatch.setattr(text._control, "_tokenizer", whole)
    monkeypatch.setattr(text._control, "_plain", plain)
    assert await Admission(FACTS, text).tokenize(Prompt(messages=CHATS[name])) == expected
    (thread,) = whole.threads | plain.threads
    assert thread.startswith("inferq-tokenize")
    assert sum(map(sum, plain.batches)) > 4 * BATCH_CHARS
    for sizes in plain.batches:
        assert len(sizes) == 1 or sum(sizes) <= BATCH_CHARS
    assert len(plain.batches) <= 2 + 2 * sum(map(sum, plain.batches)) // BATCH_CHARS, "nor one call for each message"


@given(lengths=st.lists(st.integers(0, 2 * BATCH_CHARS), max_size=12))
def test_batches_have_all_texts_in_order_and_no_more_than_they_may(lengths: list[int]) -> None:
    texts = ["x" * length for length in lengths]
    batches = list(_batches(texts))
    assert [text for batch in batches for text in batch] == texts
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(map(len, batch)) <= BATCH_CHARS


@pytest.mark.parametrize("num_chars", [0, 1, BATCH_CHARS - 1, BATCH_CHARS, BATCH_CHARS + 1, 3 * BATCH_CHARS])
def test_stand_ins_are_restored_wherever_a_piece_ends(num_chars: int) -> None:
    stand_ins = StandIns([])
    char = stand_ins.stand_in("<|im_end|>")
    assert (
        stand_ins.restore("x" * num_chars + char + "y" * num_chars) == "x" * num_chars + "<|im_end|>" + "y" * num_chars
    )
