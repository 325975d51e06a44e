"""The request of one generation job, and every bound it is checked against before anything is written."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from .contract import JOB_TTL_MS, MODEL_PATTERN

# Bounds that a request is checked against before anything is written.
MAX_PROMPT_CHARS: Final = 4 * 1024 * 1024
MAX_PROMPT_TOKENS: Final = 1024 * 1024
MAX_MESSAGES: Final = 4096
MAX_MESSAGE_VALUES: Final = 32 * 1024
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_TOKENS: Final = 1024 * 1024
MAX_TEMPERATURE: Final = 100.0
MAX_SEED: Final = 2**63 - 1
MAX_DEADLINE_MS: Final = JOB_TTL_MS

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]


class _Wire(BaseModel):
    """A model of the wire: frozen, strict about its own fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Message(_Wire):
    """One chat message. `content` may be null where the template allows it (an assistant's tool call).

    Further fields, of any JSON value, are the template's business.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | None = None
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    @model_validator(mode="after")
    def _plain_json(self) -> Message:
        try:
            _json_of(self.model_extra)
        except (ValueError, RecursionError):
            raise ValueError(
                "further fields must be JSON: no NaN or infinity, no lone surrogate, not too deep"
            ) from None
        return self

    @property
    def num_chars(self) -> int:
        """What the message counts against the bound of a prompt: its text, and its further fields as JSON."""
        return len(self.content or "") + (len(_json_of(self.model_extra)) if self.model_extra else 0)

    @property
    def num_values(self) -> int:
        """How many JSON values the further fields hold: time goes with their number, not only with their size."""
        return _count_values(self.model_extra) if self.model_extra else 0


class Sampling(_Wire):
    """How tokens are chosen and when generation ends. The defaults sample from the model's own distribution."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0.0, le=MAX_TEMPERATURE)
    top_k: int = Field(default=0, ge=0, le=MAX_TOKEN_ID)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    stop: tuple[str, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
            _reject_surrogates(text)
        return value


class GenerateRequest(_Wire):
    """One generation job, as it travels in arq's payload. Exactly one of the three prompts is given."""

    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARS)
    prompt_token_ids: tuple[TokenId, ...] | None = Field(default=None, max_length=MAX_PROMPT_TOKENS)
    messages: tuple[Message, ...] | None = Field(default=None, max_length=MAX_MESSAGES)
    sampling: Sampling = Sampling()
    priority: int = Field(default=0, ge=-100, le=100)
    deadline_ms: int | None = Field(default=None, ge=1, le=MAX_DEADLINE_MS)
    model: str | None = Field(default=None, pattern=MODEL_PATTERN)
    tenant: str = Field(default="", max_length=128)
    trace: str | None = Field(default=None, pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        given = [n for n in ("prompt", "prompt_token_ids", "messages") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of prompt, prompt_token_ids and messages")
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} must not be empty")
        for text in [self.prompt] if self.prompt else [m.content for m in self.messages or ()]:
            _reject_surrogates(text or "")
        if sum(message.num_chars for message in self.messages or ()) > MAX_PROMPT_CHARS:
            raise ValueError(f"messages have more than {MAX_PROMPT_CHARS} characters together")
        if sum(message.num_values for message in self.messages or ()) > MAX_MESSAGE_VALUES:
            raise ValueError(f"the further fields of messages have more than {MAX_MESSAGE_VALUES} values together")
        return self


def _count_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count_values, value.values()))
    return 1 + sum(map(_count_values, value)) if isinstance(value, list) else 1


def _json_of(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def _reject_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"text has a lone surrogate at character {exc.start}, which is not valid Unicode") from None
