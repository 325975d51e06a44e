"""Filters of chat templates that are not jinja2's own: as Hugging Face has them, or bounded in what they make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from jinja2 import pass_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context

from .template_bounds import check_printf, check_replace, joined, refuse

_MAX_JSON_OPTION: Final = 16


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter would escape what HTML needs escaped."""
    for option in (indent, *(separators or ())):
        if (option if isinstance(option, int) else len(option or "")) > _MAX_JSON_OPTION:
            refuse("JSON that is too wide")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return joined("", encoder.iterencode(value))


@pass_context
def join(context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return joined(str(d), value)


def printf(value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise TypeError("format takes values in order or by name, not both")
    text = value if isinstance(value, str) else str(value)
    check_printf(text, kwargs or args)
    return text % (kwargs or args)


def replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    check_replace(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), -1 if count is None else count)
