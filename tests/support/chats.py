"""The text of a chat as a model's template renders it: what transformers' own rendering is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferq.engine.text import TextProcessor


def render_chat(
    text: TextProcessor,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """What `encode_chat` is about to encode, as one text. Raises InvalidRequestError as it does."""
    rendered, stand_ins = text._render(messages, tools, add_generation_prompt)
    return stand_ins.restore(rendered)
