"""What of a request the parent can judge by itself: its shape, its size, its token ids against the model's facts.

What needs the pool of KV blocks the child judges. Everything that is wrong with a request is an InvalidRequestError
that names the limit, raised before the child hears of it. Standard library only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .errors import InvalidRequestError, SlowTemplateError
from .pipe import Ready
from .request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from .detokenizer import OutputText, Piece
    from .text import TextProcessor

T = TypeVar("T")
#: A prompt of more characters and values is tokenized in a thread.
_INLINE_SIZE: Final = 4096
#: More tokens of an earlier run are turned into text in that thread.
INLINE_TOKENS: Final = 2048
#: Of the processor: a template that takes longer over a short chat is rendered in that thread too.
_INLINE_SECONDS: Final = 0.02
MAX_VALUES: Final = 2_000_000
_MAX_SHOWN_BITS: Final = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request starts from: exactly one of a text, token ids, or a chat's messages."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.text, self.token_ids, self.messages) if x is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"exactly one of prompt, prompt_token_ids and messages must be given, not {len(given)}"
            )
        if not isinstance(self.text, str | None) or not hasattr(given[0], "__len__"):
            raise InvalidRequestError(f"a prompt cannot be of type {type(given[0]).__name__}")
        if not len(given[0]):
            raise InvalidRequestError("the prompt is empty")

    @property
    def num_chars(self) -> int:
        """Characters that will be tokenized, about; 0 where the token ids were given.

        Raises InvalidRequestError for messages of more than MAX_VALUES values, or that hold themselves.
        """
        if self.text is not None:
            return len(self.text)
        num_chars, num_values = _measure(self.messages)
        if num_values > MAX_VALUES:
            raise InvalidRequestError(f"the messages hold more than {MAX_VALUES} values")
        return num_chars

    @property
    def is_short(self) -> bool:
        """Whether it is encoded within a millisecond, as far as its size tells."""
        if self.text is not None:
            return len(self.text) <= _INLINE_SIZE
        # A template walks through every value of a chat, whether it holds text or not.
        return sum(_measure(self.messages, enough=_INLINE_SIZE)) <= _INLINE_SIZE

    def check_size(self, max_model_len: int, max_token_chars: int) -> None:
        """Refuse what cannot fit the context even if every token were the longest one there is."""
        limit = max_model_len * max_token_chars
        if (num_chars := self.num_chars) > limit:
            raise InvalidRequestError(
                f"the prompt has {num_chars} characters: max_model_len {max_model_len} is over before them, "
                f"as no token of this model has more than {max_token_chars}"
            )

    def encode(self, text: TextProcessor, *, limit_seconds: float | None = None) -> list[int]:
        """The prompt's token ids. Slow for a long prompt.

        Raises InvalidRequestError; SlowTemplateError where a template takes more than `limit_seconds`.
        """
        if self.token_ids is not None:
            return list(self.token_ids)
        if self.text is not None:
            return text.encode(self.text)
        return text.encode_chat(self.messages or (), limit_seconds=limit_seconds)


def _measure(value: object, *, enough: float = math.inf) -> tuple[int, int]:
    """How many characters and how many values a chat holds; it ends above MAX_VALUES values, or `enough` of both."""
    num_chars = num_values = 0
    left = [value]
    while left and num_values <= MAX_VALUES and num_chars + num_values <= enough:
        item = left.pop()
        num_values += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return num_chars, num_values


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request is launched with."""

    prompt_token_ids: list[int]
    generated_token_ids: list[int]  #: output of an earlier run, which this one goes on from
    sampling: dict[str, Any]  #: the `sampling` of its Add message
    output: OutputText  #: as it is after the generated tokens, once they are replayed
    finish_reason: FinishReason | None = None  #: that of the generated tokens, if their number or the last one ends it
    num_chars: int = 0  #: of the text that the generated tokens had released
    end: Piece | None = None  #: what is left to say, where the generated tokens are all there is

    @property
    def is_short(self) -> bool:
        """Whether it is replayed within some milliseconds."""
        return len(self.generated_token_ids) <= INLINE_TOKENS

    def replay(self) -> Admitted:
        """This, with the text of the generated tokens behind it. Once at most; slow for many."""
        replayed = self.output.replay(self.generated_token_ids, self.finish_reason)
        return replace(self, num_chars=replayed.num_chars, end=replayed.end)


@dataclass(slots=True)
class Admission:
    """The model's facts and its text side: every request passes here. Belongs to one event loop."""

    facts: Ready
    text: TextProcessor
    _slow_template: bool = False
    # One thread: several would fight each other and the event loop for the interpreter.
    _tokenizer_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="inferq-tokenize")
    )

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids: in a thread, one at a time, where it is long. Raises InvalidRequestError."""
        is_short = prompt.is_short
        if is_short or prompt.text is not None:
            self._check_size(prompt)  # a look at the length, which needs no thread
        if is_short and not (self._slow_template and prompt.messages is not None):
            try:
                return prompt.encode(self.text, limit_seconds=_INLINE_SECONDS)
            except SlowTemplateError:
                self._slow_template = True
        return await self.in_thread(partial(self._encode, prompt))

    async def in_thread(self, function: Callable[[], T]) -> T:
        """What it returns; one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function)

    def _encode(self, prompt: Prompt) -> list[int]:
        self._check_size(prompt)
        return prompt.encode(self.text)

    def _check_size(self, prompt: Prompt) -> None:
        prompt.check_size(self.facts.max_model_len, self.text.max_token_chars)

    def admit(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, generated: Sequence[int] = ()
    ) -> Admitted:
        """Check a tokenized request against the model. What was generated has yet to be replayed.

        Raises InvalidRequestError.
        """
        facts = self.facts
        # The length comes first: a look at each of a million ids would hold up everybody.
        _check_room(len(prompt_token_ids), sampling.max_tokens, facts.max_model_len)
        _check_ids("the prompt", prompt_token_ids, facts.vocab_size)
        _check_ids("the generated tokens", generated, facts.vocab_size)
        _check_ids("stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
        fields = {
            "max_tokens": sampling.max_tokens,  # None: the child knows how much room context and pool leave
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": sorted({*sampling.stop_token_ids, *self.text.special_stop_ids(sampling.stop)}),
            "ignore_eos": sampling.ignore_eos,
        }
        end = self._end_of(len(prompt_token_ids), generated, fields)
        return Admitted(list(prompt_token_ids), list(generated), fields, self.text.output(sampling), end)

    def _end_of(self, num_prompt_tokens: int, generated: Sequence[int], fields: dict[str, Any]) -> FinishReason | None:
        """Why nothing more is to be generated after these tokens: what the child would have said with the last one."""
        if not generated:
            return None
        if generated[-1] in self.facts.stop_ids(fields["stop_token_ids"], ignore_eos=fields["ignore_eos"]):
            return FinishReason.STOP
        if len(generated) >= self.facts.output_limit(num_prompt_tokens, fields["max_tokens"]):
            return FinishReason.LENGTH
        return None


def load_text(text_dir: str) -> TextProcessor:
    """Blocks for 0.2 s: tokenizers and jinja2 are imported here, where they are needed, and not with the engine."""
    from .text import TextProcessor

    return TextProcessor.load(text_dir)


def _check_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not set(map(type, token_ids)) <= {int}:
        raise InvalidRequestError(f"{what} must be integers")
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            shown = token_id if token_id.bit_length() < _MAX_SHOWN_BITS else "of too many digits"
            raise InvalidRequestError(
                f"token id {shown} in {what} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
            )


def _check_room(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens")
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens, and max_model_len is {max_model_len}: "
            "at least one must be left for the answer"
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt_tokens + max_tokens}, over max_model_len {max_model_len}"
        )
