"""Twenty chat templates that use what real ones use, rendered by transformers and by us: the same text, or no text.

Likewise the token ids, over three kinds of tokenizers, as long as no message holds the text of a control token.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from support import tokenizers as made
from support.chats import render_chat
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from inferq.engine import sandbox
from inferq.engine.errors import InvalidRequestError
from inferq.engine.text import TextProcessor

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now> & "then", d\'accord?',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "In English or in ďábelské ódy"},
                "days": {"type": ["integer", "null"]},
                "tags": {"type": "array", "items": {"type": "number"}},
                "more": {"type": "object"},
            },
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Brno", "days": 2}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Is it so?"}],
    "system": [{"role": "system", "content": " You are terse.\n"}, {"role": "user", "content": "  alpha\tbeta  "}],
    "turns": [
        {"role": "user", "content": "Hi,\nthere {{ bos_token }} {% raw %}"},
        {"role": "assistant", "content": "Hello <b>you</b> & me"},
        {"role": "user", "content": "ďábelské ódy 🦙 \u2028 \u00a0 \\n"},
    ],
    "many": [
        {"role": role, "content": f"turn {n}: a rather long line of words that goes on and on, {role}"}
        for n in range(3)
        for role in ("user", "assistant")
    ]
    + [{"role": "user", "content": "/stop now"}],
    "tools": [
        {"role": "user", "content": "What about the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "get_weather", "content": '{"rain": true, "sun": [1.5, null]}'},
        {"role": "tool", "name": "get_weather", "content": "again"},
        {"role": "assistant", "content": "It rains."},
    ],
    "null_content": [
        {"role": "user", "content": "Call it twice."},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "name": None},
    ],
    "thinking": [
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nThen."},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "So.", "reasoning": "because"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "!"}],
        }
    ],
    "unknown_part": [{"role": "user", "content": [{"type": "video"}]}],
    "two_users": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
    "unknown_role": [{"role": "narrator", "content": "Once upon a time"}],
    "assistant_first": [{"role": "assistant", "content": "I begin."}],
    "tool_first": [{"role": "tool", "content": "I come from nowhere."}],
    "empty_content": [{"role": "user", "content": ""}],
    "no_content": [{"role": "user"}],
    "no_role": [{"content": "who?"}],
    "numbers": [{"role": "user", "content": "1", "weight": 0.5, "flags": [True, None, 3], "of": {"b": 1, "a": "x"}}],
}
TOOLS = {"no_tools": None, "tools": [WEATHER], "empty_tools": []}
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


class FrozenTime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> FrozenTime:
        return cls(2025, 2, 3, 4, 5, 6, tzinfo=tz)


@pytest.fixture(autouse=True)
def frozen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chat_template_utils, sandbox):
        monkeypatch.setattr(module, "datetime", FrozenTime)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedTokenizerFast, TextProcessor]]:
    """For each template, transformers' tokenizer of a folder and ours."""
    found = {}
    for path in TEMPLATES:
        folder = made.write_folder(
            tmp_path_factory.mktemp(path.stem),
            made.byte_level(),
            config=NAMED,
            template=path.read_text(encoding="utf-8"),
        )
        found[path.stem] = (PreTrainedTokenizerFast.from_pretrained(folder), TextProcessor.load(folder))
    return found


def theirs(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """What transformers makes of it; None where it raises."""
    try:
        return tokenizer.apply_chat_template(messages, **fields)
    except Exception:  # any error of jinja2's or Python's: all that counts is that there is one
        return None


def test_there_are_twenty() -> None:
    assert len(TEMPLATES) == 20


@pytest.mark.parametrize("name", [path.stem for path in TEMPLATES])
@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no_prompt"])
def test_a_template_gives_what_transformers_gives(pairs: Any, name: str, tools: str, prompt: bool) -> None:
    tokenizer, text = pairs[name]
    rendered = 0
    for label, messages in CONVERSATIONS.items():
        fields: dict[str, Any] = {"tools": TOOLS[tools], "add_generation_prompt": prompt}
        expected = theirs(tokenizer, messages, tokenize=False, **fields)
        if expected is None:
            with pytest.raises(InvalidRequestError):
                render_chat(text, messages, **fields)
            continue
        rendered += 1
        assert render_chat(text, messages, **fields) == expected, label
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **fields)
        if "<|im_" not in str(messages):
            assert text.encode_chat(messages, **fields) == ids, label
    assert rendered >= 1


@pytest.mark.parametrize("name", [path.stem for path in TEMPLATES])
def test_a_template_tells_why_it_refuses(pairs: Any, name: str) -> None:
    """The words of an error that the template raises itself are those that transformers passes on."""
    tokenizer, text = pairs[name]
    for messages in CONVERSATIONS.values():
        try:
            tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
        except Exception as exc:
            with pytest.raises(InvalidRequestError) as caught:
                render_chat(text, messages, tools=[WEATHER], add_generation_prompt=False)
            assert str(exc) in str(caught.value)


def test_among_them_they_refuse_and_render_enough(pairs: Any) -> None:
    """Without this, all the others could agree on nothing."""
    results = {
        (name, label): theirs(tokenizer, messages, tokenize=False)
        for name, (tokenizer, _) in pairs.items()
        for label, messages in CONVERSATIONS.items()
    }
    refused = {key for key, text in results.items() if text is None}
    assert {("alternating", "two_users"), ("no_system", "system"), ("content_parts", "unknown_part")} <= refused
    assert len(refused) >= 40
    assert len(set(results.values())) >= 200
    assert "03 Feb 2025" in results["dated", "one"]
