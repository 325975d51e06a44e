"""Where chat templates run: jinja2's immutable sandbox with what Hugging Face gives them, and an end to all they do.

A template comes with a downloaded model: it can compute, but neither reach Python's internals, nor run for ever, nor
hold up the process or fill its memory. Nothing is computed while it is compiled; of a rendering all steps, all time
and all bytes made are counted, and no single value gets large (`template_bounds.py`). Knows nothing of messages and
tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from . import template_bounds as bounds
from . import template_filters as filters
from .template_guards import COMPARED, COUNTED, JOINED, MADE, guard

#: Loop passes, calls, filters and tests of one rendering. A chat of thousands of messages needs some tens of thousands.
MAX_STEPS: Final = 1_000_000
#: Of the processor, for one rendering.
MAX_SECONDS: Final = 5.0
#: Of all that one rendering makes, kept or not.
MAX_BYTES: Final = 512 * 1024 * 1024
#: A longer source is not compiled, which holds the interpreter's lock.
MAX_SOURCE_CHARS: Final = 128 * 1024
_MAX_TIME_FORMAT: Final = 256

#: A name that no template can spell, since it holds a space.
_WORK: Final = "work so far"


class OutOfTimeError(SecurityError):
    """A rendering has used up the time it was given."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates, whose every operation is counted and bounded."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            optimized=False,  # no constants are folded: what a template computes is computed in a rendering
            finalize=_shown,
        )
        self.filters |= {"tojson": filters.to_json, "join": filters.join, "format": filters.printf}
        self.filters["replace"] = filters.replace
        self.filters = _all_guarded(self.filters)
        self.filters |= {COUNTED: _counted, COMPARED: _compared, JOINED: _concatenated, MADE: _made}
        self.tests = _all_guarded(self.tests)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _DictMaker()
        self.globals["namespace"] = _SafeNamespace

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """Raises TemplateError, and whatever the compiler raises."""
        if len(source) > MAX_SOURCE_CHARS:
            raise SecurityError(f"it has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        return super().from_string(source, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(guard(source), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return _made(context, bounds.calculate(operator, self.binop_table[operator], left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _take_step(context)
        if isinstance(obj, LoopContext) and args:  # a recursive loop goes over the argument
            args = (_counted(context, args[0]), *args[1:])
        if isinstance(obj, BuiltinMethodType | MethodType):
            args = _checked_arguments(obj, args, kwargs)
        return _made(context, super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map` as the sandbox has them, with an end to what they make."""
        text = getattr(value, "__self__", None)
        if super().wrap_str_format(value) is None or not isinstance(text, str):
            return None
        formatter = bounds.bounded_formatter(self, getattr(text, "escape", None))
        if value.__name__ == "format_map":
            return lambda mapping: type(text)(formatter.vformat(text, (), mapping))
        return lambda *args, **kwargs: type(text)(formatter.vformat(text, args, kwargs))


def render_variables(variables: Mapping[str, Any], *, limit_seconds: float | None = None) -> dict[str, Any]:
    """The variables of one rendering, which begins now, in this thread, with its count of work.

    The rendering raises OutOfTimeError after `limit_seconds` of the processor, MAX_SECONDS by default.
    """
    return {**variables, _WORK: _Work(MAX_SECONDS if limit_seconds is None else limit_seconds)}


@dataclass(slots=True)
class _Work:
    """What one rendering has done so far."""

    limit_seconds: float
    started_at: float = field(default_factory=time.thread_time)
    steps: int = 0
    made_bytes: int = 0

    def take_step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        if time.thread_time() - self.started_at > self.limit_seconds:
            raise OutOfTimeError(f"the template takes more than {self.limit_seconds:g} seconds")

    def make(self, value: object) -> None:
        self.made_bytes += sys.getsizeof(value)
        if self.made_bytes > MAX_BYTES:
            raise SecurityError(f"the template makes more than {MAX_BYTES} bytes")


def _work(context: Context) -> _Work:
    work = context.parent.get(_WORK)
    if not isinstance(work, _Work):
        raise SecurityError("a template is rendered with render_variables only")
    return work


def _take_step(context: Context) -> None:
    _work(context).take_step()


@pass_context
def _made(context: Context, value: Any) -> Any:
    """A value that a template has made, if it is not too large."""
    if isinstance(value, GeneratorType):
        return _counted(context, value)
    bounds.weigh(value)
    _work(context).make(value)
    return value


@pass_context
def _shown(context: Context, value: Any) -> str:
    text = str(value)
    _made(context, text)
    return text


@pass_context
def _compared(context: Context, value: Any) -> Any:
    _take_step(context)
    return value


@pass_context
def _concatenated(context: Context, values: Iterable[Any]) -> Any:
    return _made(context, bounds.joined("", values))


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _take_step(context)
        yield item


def _all_guarded(functions: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _guarded(name, function) for name, function in functions.items()}


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test as a counted step with bounded arguments and a bounded result."""
    passed = getattr(function, "jinja_pass_arg", None)
    wanted = None if passed is None else passed.name

    @pass_context
    def apply(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        _take_step(context)
        bounds.check_filter(name, value, [*args, *kwargs.values()])
        match wanted:
            case "context":
                args = (context, value, *args)
            case "eval_context":
                args = (context.eval_ctx, value, *args)
            case "environment":
                args = (context.environment, value, *args)
            case _:
                args = (value, *args)
        return _made(context, function(*args, **kwargs))

    return apply


def _checked_arguments(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    owner = method.__self__
    if isinstance(owner, str) and method.__name__ == "join" and len(args) == 1:
        args = (list(args[0]),)  # what it joins is weighed first
    own = [value for name, value in kwargs.items() if not name.startswith("_")]
    bounds.check_method(method.__name__, owner, [*args, *own])
    return args


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

    def __repr__(self) -> str:  # with its values, namespaces of namespaces would make a text without end
        return "<Namespace>"


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
    if len(format) > _MAX_TIME_FORMAT:
        bounds.refuse("a format of time that is too long")
    return datetime.now().strftime(format)
