"""Where chat templates run: jinja2's immutable sandbox with what Hugging Face gives them, and an end to every loop.

A template comes with a downloaded model: it can compute, but neither reach Python's internals nor run for ever. Knows
nothing of messages and tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: Loop passes and calls of one rendering. A chat of thousands of messages needs some tens of thousands.
MAX_STEPS: Final = 1_000_000

# Names that no template can spell, since they hold a space.
_STEPS: Final = "steps so far"
_COUNTED: Final = "counted loop"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Every loop and every call of a rendering counts as a step."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _DictMaker()
        self.globals["namespace"] = _SafeNamespace

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _take_step(context)
        if isinstance(obj, LoopContext) and args:  # a recursive loop goes over the argument
            args = (_counted(context, args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)


def render_variables(**variables: Any) -> dict[str, Any]:
    """The variables of one rendering, with its count of steps."""
    return {**variables, _STEPS: [0]}


def _take_step(context: Context) -> None:
    steps = context.parent.get(_STEPS)
    if steps is None:
        raise SecurityError("a template is rendered with render_variables only")
    steps[0] += 1
    if steps[0] > MAX_STEPS:
        raise SecurityError(f"the template takes more than {MAX_STEPS} steps")


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _take_step(context)
        yield item


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore, which Python gives a meaning."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _DictMaker:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter would escape what HTML needs escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
