"""The chat templates of a model, rendered to text.

They see what transformers shows them, so that the text is the same byte for byte. Whatever goes wrong is the
request's fault as far as its user is concerned: an InvalidRequestError with the template's own words. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2.environment import Template
from jinja2.exceptions import TemplateError

from .errors import InvalidRequestError, SlowTemplateError
from .sandbox import OutOfTimeError, TemplateEnvironment, render_variables
from .template_bounds import weigh

MAX_RENDERED_CHARS: Final = 8 * 1024 * 1024
_MAX_MESSAGE_CHARS: Final = 500
#: What a message's reasoning is called; templates read the first, gpt-oss the second.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of one model, by name, compiled once; `default` is used, or `tool_use` where tools are given.

    `variables` are what every rendering sees besides the chat: the special tokens. Safe to use from many threads.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        environment = TemplateEnvironment()
        self._templates = {name: _compile(environment, source) for name, source in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        limit_seconds: float | None = None,
    ) -> str:
        """The chat as text. `messages` and `tools` are plain values: dict, list, str, int, float, bool, None.

        Raises InvalidRequestError: no template, a chat that the template refuses, a text that gets too long; and
        SlowTemplateError after `limit_seconds` of the processor, where they are given.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty")
        template = self._choose(has_tools=tools is not None)
        chat = {
            "messages": [_normalized(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables = render_variables({**self._variables, **chat}, limit_seconds=limit_seconds)
        try:
            weigh([messages, tools])
            return _bounded(template, variables)
        except InvalidRequestError:
            raise
        except OutOfTimeError as exc:
            raise SlowTemplateError(f"the chat template cannot render these messages: {exc}") from exc
        except TemplateError as exc:
            raise InvalidRequestError(_shortened(f"the chat template refuses these messages: {exc}")) from exc
        except Exception as exc:  # a template can fail in any way that Python can
            raise InvalidRequestError(
                _shortened(f"the chat template cannot render these messages: {type(exc).__name__}: {exc}")
            ) from exc

    def _choose(self, *, has_tools: bool) -> Template:
        if not self._templates:
            raise InvalidRequestError("this model has no chat template: send a prompt instead of messages")
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequestError(
                f"this model has no chat template named default, only {', '.join(sorted(self._templates))}"
            )
        template = self._templates[name]
        if isinstance(template, str):
            raise InvalidRequestError(template)
        return template


def _compile(environment: TemplateEnvironment, source: str) -> Template | str:
    """A template, or why it is none: prompts that need no template are served all the same."""
    try:
        return environment.from_string(source)
    except Exception as exc:  # a syntax error, or one of the compiler's own
        return _shortened(f"this model's chat template is not valid: {exc}")


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that hold None, which templates would print; with the reasoning under each of its names."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    if reasoning is not None:
        present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return present


def _bounded(template: Template, variables: dict[str, Any]) -> str:
    blocks = []
    num_chars = 0
    for block in template.generate(variables):
        num_chars += len(block)
        if num_chars > MAX_RENDERED_CHARS:
            raise InvalidRequestError(f"the chat template makes more than {MAX_RENDERED_CHARS} characters of this")
        blocks.append(block)
    return "".join(blocks)


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}..."
