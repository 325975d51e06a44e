"""What of a request the parent can judge by itself: its shape, its size, its token ids against the model's facts.

What needs the pool of KV blocks the child judges. Everything that is wrong with a request is an InvalidRequestError
that names the limit, raised before the child hears of it. Standard library only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .errors import InvalidRequestError
from .pipe import Ready
from .request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from .detokenizer import OutputText, Piece
    from .text import TextProcessor

#: A longer prompt is tokenized in a thread.
_INLINE_CHARS: Final = 4096


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
        if not len(given[0]):
            raise InvalidRequestError("the prompt is empty")

    @property
    def num_chars(self) -> int:
        """Characters that will be tokenized, about; 0 where the token ids were given."""
        return _count_chars(self.messages) if self.text is None else len(self.text)

    def check_size(self, max_model_len: int, max_token_chars: int) -> None:
        """Refuse what cannot fit the context even if every token were the longest one there is."""
        limit = max_model_len * max_token_chars
        if self.num_chars > limit:
            raise InvalidRequestError(
                f"the prompt has {self.num_chars} characters: max_model_len {max_model_len} is over before them, "
                f"as no token of this model has more than {max_token_chars}"
            )

    def encode(self, text: TextProcessor) -> list[int]:
        """The prompt's token ids. Slow for a long prompt. Raises InvalidRequestError."""
        if self.token_ids is not None:
            return list(self.token_ids)
        if self.text is not None:
            return text.encode(self.text)
        return text.encode_chat(self.messages or ())


def _count_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_count_chars(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_count_chars(item) for item in value)
    return 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request is launched with."""

    prompt_token_ids: list[int]
    generated_token_ids: list[int]  #: output of an earlier run, which this one goes on from
    sampling: dict[str, Any]  #: the `sampling` of its Add message
    output: OutputText  #: as it is after the generated tokens
    num_chars: int = 0  #: of the text that the generated tokens had released
    end: Piece | None = None  #: what is left to say, where the generated tokens are all there is


@dataclass(frozen=True, slots=True)
class Admission:
    """The model's facts and its text side: every request passes here."""

    facts: Ready
    text: TextProcessor

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids: in a thread where it is long. Raises InvalidRequestError."""
        prompt.check_size(self.facts.max_model_len, self.text.max_token_chars)
        if prompt.num_chars <= _INLINE_CHARS:
            return prompt.encode(self.text)
        return await asyncio.to_thread(prompt.encode, self.text)

    def admit(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, generated: Sequence[int] = ()
    ) -> Admitted:
        """Check a tokenized request against the model. Raises InvalidRequestError."""
        facts = self.facts
        _check_ids("the prompt", prompt_token_ids, facts.vocab_size)
        _check_ids("the generated tokens", generated, facts.vocab_size)
        _check_ids("stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
        _check_room(len(prompt_token_ids), sampling.max_tokens, facts.max_model_len)
        fields = {
            "max_tokens": sampling.max_tokens,  # None: the child knows how much room context and pool leave
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": sorted({*sampling.stop_token_ids, *self.text.special_stop_ids(sampling.stop)}),
            "ignore_eos": sampling.ignore_eos,
        }
        output = self.text.output(sampling)
        replayed = output.replay(generated, self._end_of(len(prompt_token_ids), generated, fields))
        return Admitted(
            list(prompt_token_ids), list(generated), fields, output, num_chars=replayed.num_chars, end=replayed.end
        )

    def _end_of(self, num_prompt_tokens: int, generated: Sequence[int], fields: dict[str, Any]) -> FinishReason | None:
        """Why nothing more is to be generated after these tokens: what the child would have said with the last one."""
        if not generated:
            return None
        if generated[-1] in self.facts.stop_ids(fields["stop_token_ids"], ignore_eos=fields["ignore_eos"]):
            return FinishReason.STOP
        if len(generated) >= self.facts.output_limit(num_prompt_tokens, fields["max_tokens"]):
            return FinishReason.LENGTH
        return None


def _check_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not set(map(type, token_ids)) <= {int}:
        raise InvalidRequestError(f"{what} must be integers")
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} in {what} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
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
