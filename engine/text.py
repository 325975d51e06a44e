"""The worker's side of a model's text: prompts and chats to token ids, and token ids back to text.

By `tokenizers` and jinja2 alone: never imports torch or transformers, and gives what transformers gives, except that
no message can smuggle in a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .control_tokens import ControlTokens, StandIns
from .decoders import decoder_factory
from .detokenizer import OutputText
from .errors import InvalidRequestError
from .request import SamplingParams
from .stop_strings import StopMatcher, StopStrings
from .template import ChatTemplate
from .tokenizer_files import TokenizerFiles


class TextProcessor:
    """Tokenizer, chat template and detokenizer of one model. Safe to use from many threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self._template = ChatTemplate(files.templates, files.special_tokens)
        self._sources = tuple(files.templates.values())
        self._control = ControlTokens(files.tokenizer)
        self._decoder = decoder_factory(files.tokenizer)
        added = files.tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        #: Of the longest token: a longer prompt than the context times this is too long, whatever its tokens are.
        self.max_token_chars = max(map(len, files.tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, text_dir: str | Path) -> TextProcessor:
        """Read a folder with tokenizer.json and, where the model has them, its configuration and templates.

        Takes some tenths of a second. Raises FileNotFoundError without tokenizer.json, ValueError for broken files.
        """
        return cls(TokenizerFiles.read(Path(text_dir)))

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt as it is: control tokens in it count, and the model's own are added.

        Raises InvalidRequestError for text that is not valid Unicode.
        """
        try:
            # Unlike `encode`, this lets go of the interpreter's lock, so that a long prompt stops no other thread.
            return list(self._tokenizer.encode_batch_fast([prompt])[0].ids)
        except TypeError as exc:
            raise _not_unicode("the prompt") from exc

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        limit_seconds: float | None = None,
    ) -> list[int]:
        """The ids of a chat as the model's template renders it; control tokens are the template's alone.

        Raises InvalidRequestError: no template, or one that refuses the chat, in its own words; SlowTemplateError
        where it takes more of the processor than `limit_seconds`.
        """
        rendered, stand_ins = self._render(messages, tools, add_generation_prompt, limit_seconds)
        try:
            return self._control.encode(rendered, stand_ins)
        except TypeError as exc:
            raise _not_unicode("the chat") from exc

    def output(self, sampling: SamplingParams) -> OutputText:
        """A new request's way back from token ids to text."""
        texts = {token_id: text for text in sampling.stop if (token_id := self._special_ids.get(text)) is not None}
        return OutputText(
            self._decoder(sampling.skip_special_tokens),
            StopMatcher(StopStrings(sampling.stop), include=sampling.include_stop_str_in_output),
            include_stop=sampling.include_stop_str_in_output,
            stop_token_texts=texts,
        )

    def special_stop_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """The ids of the stop strings that are special tokens: these may never show in the text."""
        return tuple(self._special_ids[text] for text in stop if text in self._special_ids)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        limit_seconds: float | None = None,
    ) -> tuple[str, StandIns]:
        try:
            stand_ins = StandIns(messages, tools, self._sources)
            chat, marked_tools = self._control.mark(messages, stand_ins), self._control.mark(tools, stand_ins)
        except RecursionError as exc:
            raise InvalidRequestError("the messages are nested too deeply") from exc
        if not all(isinstance(message, dict) for message in chat):
            raise InvalidRequestError("each message must be an object")
        rendered = self._template.render(
            chat, tools=marked_tools, add_generation_prompt=add_generation_prompt, limit_seconds=limit_seconds
        )
        return stand_ins.unescape(rendered), stand_ins


def _not_unicode(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what} is not valid Unicode: it has a lone surrogate")
