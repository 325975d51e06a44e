"""How large a value of a chat template may get, and what one operation may cost: told before it is done.

One operation of Python's holds the interpreter's lock to its end, and no count of steps can stop it. So no value gets
heavier than MAX_WEIGHT, and what could make a heavier one, or take longer than its operands are heavy, is refused by
its arguments. Knows plain values and jinja2's formatter; nothing of messages and renderings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any, Final, NoReturn

from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

#: A character weighs 1, a value NODE_WEIGHT and what it holds: the largest chat, and some tens of milliseconds of work.
MAX_WEIGHT: Final = 16 * 1024 * 1024
NODE_WEIGHT: Final = 8
#: Numbers are below two to the power of this.
MAX_BITS: Final = 1 << 16
#: What a filter may be given as a number: a width, a length, a count.
MAX_ARGUMENT: Final = 1_000_000
_MAX_DECIMALS: Final = 1000
#: For filters that need more time than a few passes over the text.
MAX_SLOW_WEIGHT: Final = 64 * 1024
_SLOW: Final = frozenset(
    ["striptags", "urlize", "wordwrap", "xmlattr", "pprint", "int", "float", "filesizeformat", "title", "wordcount"]
)
#: Characters compared with characters, in the methods that may compare each with each.
_MAX_COMPARISONS: Final = 1 << 28
_COMPARING: Final = frozenset(["strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition", "translate"])
_PADDING: Final = frozenset(["center", "ljust", "rjust", "zfill"])
#: Digits of the widths and precisions that a format may have.
_MAX_FIELD_DIGITS: Final = 3
_PRINTF_FIELD: Final = re.compile(r"[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?")
_NUMBERS: Final = re.compile(r"\d+")


def refuse(what: str) -> NoReturn:
    raise SecurityError(f"the template makes {what}")


def check_weight(weight: int) -> int:
    """Raises SecurityError for more than MAX_WEIGHT."""
    if weight > MAX_WEIGHT:
        refuse("a value that is too large")
    return weight


class WeighedList(list[Any]):
    """A sum of lists, whose weight is known: a list that grows in a loop is not weighed anew in each pass."""

    weight = 0


def weigh(value: object) -> int:
    """The weight of all that the value holds, what it holds twice counted twice. SecurityError over MAX_WEIGHT."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        total += NODE_WEIGHT
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, WeighedList):
            total += item.weight
        elif isinstance(item, Mapping):
            check_weight(total + 2 * NODE_WEIGHT * len(item))
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | Set | ValuesView):
            check_weight(total + NODE_WEIGHT * len(item))
            stack += item
        elif isinstance(item, int):
            total += item.bit_length() // 8
    return check_weight(total)


def calculate(operator: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """`left operator right`. Raises SecurityError where that would be too large or take too long."""
    for number in (left, right):
        if isinstance(number, int) and number.bit_length() > MAX_BITS:
            refuse("a number that is too large")
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * right > MAX_BITS:
            refuse("a number that is too large")
    elif operator == "*":
        _check_repetition(left, right)
        _check_repetition(right, left)
    elif operator == "%" and isinstance(left, str | bytes):
        check_printf(left, right)
    elif operator == "+" and isinstance(left, list) and isinstance(right, list):
        return _sum_of_lists(left, right)
    return function(left, right)


def _check_repetition(value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
        check_weight(times * (len(value) if isinstance(value, str | bytes) else weigh(value)))


def _sum_of_lists(left: list[Any], right: list[Any]) -> WeighedList:
    weight = check_weight(weigh(left) + weigh(right))
    result = WeighedList(left)
    result += right
    result.weight = weight
    return result


def check_printf(pattern: Any, values: Any) -> None:
    """Raises SecurityError for a `%` format that would make too large a text of these values."""
    if isinstance(pattern, bytes):
        refuse("bytes of a format")
    num_fields = total = 0
    for width in _printf_widths(pattern):
        num_fields += 1
        total += _field(width)
    # A mapping may be named by each field, other values are used once.
    check_weight(len(pattern) + total + weigh(values) * (num_fields if isinstance(values, Mapping) else 1))


def _printf_widths(pattern: str) -> Iterator[str]:
    """Of each field: its width and precision as written, one behind the other."""
    at = 0
    while (at := pattern.find("%", at) + 1) > 0:
        if pattern.startswith("(", at):
            at = _end_of_key(pattern, at)
        found = _PRINTF_FIELD.match(pattern, at)
        if found is not None:
            yield max(found[1] or "", found[2] or "", key=lambda width: (width == "*", len(width), width))
            at = found.end() + 1


def _end_of_key(pattern: str, at: int) -> int:
    depth = 0
    for end in range(at, len(pattern)):
        depth += (pattern[end] == "(") - (pattern[end] == ")")
        if depth == 0:
            return end + 1
    return len(pattern)


def _field(width: str) -> int:
    if width == "*" or len(width.lstrip("0")) > _MAX_FIELD_DIGITS:
        refuse("a field that is too wide")
    return int(width or 0)


class _BoundedFields(SandboxedFormatter):
    """`str.format` with an end to what its fields make."""

    _total = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        for number in _NUMBERS.findall(format_spec):
            _field(number)
        weigh(value)
        text = super().format_field(value, format_spec)
        self._total = check_weight(self._total + len(text))
        return text


class _BoundedEscapedFields(_BoundedFields, SandboxedEscapeFormatter):
    pass


def bounded_formatter(environment: Environment, escape: Any) -> SandboxedFormatter:
    """The formatter of a text, or of one that is marked as safe, which comes with its own `escape`."""
    if escape is None:
        return _BoundedFields(environment)
    return _BoundedEscapedFields(environment, escape=escape)


def check_method(name: str, owner: object, arguments: Sequence[Any]) -> None:
    """Raises SecurityError for a method of Python's own types that would make too much or take too long."""
    if isinstance(owner, bytes | int | float):
        refuse(f"use of {type(owner).__name__}.{name}")
    if not isinstance(owner, str):
        return
    first = arguments[0] if arguments else None
    if name in _PADDING:
        check_weight(first if isinstance(first, int) else 0)
    elif name == "expandtabs":
        check_weight(owner.count("\t") * (first if isinstance(first, int) else 8))
    elif name == "replace" and len(arguments) > 1:
        check_replace(owner, first, arguments[1])
    elif name == "join":
        check_join(owner, first)
    elif name in _COMPARING and first is not None and len(owner) * weigh(first) > _MAX_COMPARISONS:
        refuse(f"too many comparisons in {name}")


def check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_weight(len(text) + text.count(old) * len(new))


def check_join(separator: str, items: Any) -> None:
    weigh(items)
    if isinstance(items, list):
        check_weight(sum(map(_length, items)) + len(separator) * len(items))


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else 0


def check_filter(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Raises SecurityError for a filter that would make too much or take too long; `arguments` in any order."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT:
            refuse(f"too large a number for {name}")
        if name == "round" and isinstance(argument, int) and argument > _MAX_DECIMALS:  # it computes a power
            refuse(f"too large a number for {name}")
    if name in _SLOW and (weigh(value) > MAX_SLOW_WEIGHT or weigh(list(arguments)) > MAX_SLOW_WEIGHT):
        refuse(f"too large a value for {name}")
    if name == "sum" and not all(isinstance(argument, int | float | str) for argument in arguments):
        refuse("a sum of what are no numbers")
    if name == "indent":
        width = max([4, *(len(a) if isinstance(a, str) else int(a) for a in arguments if isinstance(a, int | str))])
        check_weight(len(str(value)) + width * (1 + len(str(value).splitlines())))


def joined(separator: str, texts: Iterable[object]) -> str:
    """`separator.join` of the texts of all values, as far as the result is no heavier than MAX_WEIGHT."""
    parts: list[str] = []
    total = 0
    for value in texts:
        text = str(value)
        total = check_weight(total + len(text) + len(separator))
        parts.append(text)
    return separator.join(parts)
