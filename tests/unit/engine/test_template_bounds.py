"""What a chat template may make: it comes with a download, and must neither hold up the process nor fill its memory.

Without the bounds most of these would run for hours, or take gigabytes, in one operation that nothing can end.
"""

from __future__ import annotations

from typing import Any

import pytest

from inferq.engine import sandbox
from inferq.engine.errors import InvalidRequestError, SlowTemplateError
from inferq.engine.template import ChatTemplate
from inferq.engine.template_bounds import WeighedList, weigh

USER = [{"role": "user", "content": "hi"}]
# ruff: noqa: E501 - templates stand on a line each
LARGE = [
    "{{ 9**(9**9) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.zfill(10**9) }}{{ ''.ljust(width=1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ('{:>1000000000}'|safe).format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10**9}) }}",
    "{{ (range(99999)|list*1000)|length }}",
    "{{ ([1]|slice(10**9))|list|length }}",
    "{{ [1]|batch(10**9, 0)|list|length }}",
    "{{ {'a':[1]}|tojson(indent=10**9) }}",
    "{{ {'a':[1]}|tojson(separators=('x'*10**6, ':')) }}",
    "{% set ns = namespace(x='x'*100) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='x'*100) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='x'*1000) %}{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% for i in range(60) %}{% set ns.x = f(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='x'*1000) %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{{ range(99999)|map('string')|join('x'*10000)|length }}",
    "{{ ('x'*10000).join(range(99999)|map('string'))|length }}",
    "{{ 'x'*10**9 }}",
    "{{ 10**9*'x' }}",
    "{{ ('a'*100000).replace('', 'b'*100000)|length }}",
    "{{ ('a'*100000)|replace('a', 'b'*100000)|length }}",
    "{{ ('\\t'*100000).expandtabs(100000)|length }}",
    "{{ ('a\\n'*100000)|indent(100000)|length }}",
    "{{ ('a\\n'*100000)|indent('b'*100000)|length }}",
    "{{ ('a '*10000)|wordwrap(1, wrapstring='b'*100000)|length }}",
    "{{ ('<!--'*1000000)|striptags }}",
    "{{ 2.5|round(10**9, 'floor') }}",
    "{{ 2.5|round(10**6, 'floor') }}",
    "{{ ('f'*10000000)|int(base=16) % 12345 }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ ('x'.encode()*3).ljust(10**9) }}",
    "{{ ('a'*8000000).rfind('b' ~ 'a'*4000000) }}",
    "{{ ('a'*8000000).strip('b'*1000000 ~ 'a') }}",
    "{{ 'x'.translate({120: 'y'*10**6})|length }}{{ ('x'*100000).translate({120: 'y'*10**6})|length }}",
    "{{ [[1]*1000]*10**6 }}",
    "{{ ([[1]]*100000)|sum(start=[])|length }}",
    "{{ strftime_now('%Y'*1000000) }}",
    "{% for a in range(99999) %}{% for b in range(9) %}{% if 'a'*8000000 == 'b'*8000000 %}{% endif %}{% endfor %}{% endfor %}",
    "{{ ('%(a)s'*100000) % {'a': 'x'*100000} }}",
    "{{ '1'*1000000|int }}{{ ('1'*1000000)|float }}",
    "{{ (messages|pprint) * 10**9 }}",
    "{% set x = messages * 10**7 %}",
    "{{ 'a'|urlize(target='x'*10**7) }}",
    "{{ ('http://a.b '*10000)|urlize(target='x'*10000) }}",
    "{{ [1][::9**(9**9)] }}",
    "{% set x = \"a\"*16000000 %}{{ x.split('a')|length }}",
    "{{ ('a'*16000000)|list|length }}",
    "{{ (messages|groupby('role'))*10**7 }}",
    "{{ ('9'*4000)|int ** 4000 }}",
    "{{ ('9'*4000)|int * ('9'*4000)|int * ('9'*4000)|int * ('9'*4000)|int * ('9'*4000)|int * ('9'*4000)|int * ('9'*4000)|int}}",
    "{{ 'x'|attr('center')(10**9) }}",
    "{% set f = 'x'.center %}{{ f(10**9) }}",
    "{{ dict.fromkeys(range(99999), 'x'*1000)|tojson }}",
    "{{ range(99999)|map('center', 1000000)|list|length }}",
]


def render(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages or USER, **fields)


@pytest.mark.parametrize("source", LARGE)
def test_what_is_too_large_is_refused_before_it_is_made(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"the template (makes|takes)|Range too big|Numerical result"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ 9**(9**9) }}", "{% if 'x' * 10**10 %}{% endif %}", "{% set a = 'x'|center(10**9) %}"]
)
def test_nothing_is_computed_while_a_template_is_compiled(source: str) -> None:
    ChatTemplate({"default": source + "{{ 1 / 0 }}"}, {})


def test_a_source_that_is_too_long_is_not_compiled() -> None:
    with pytest.raises(InvalidRequestError, match="not valid: it has 200000 characters"):
        render("x" * 200_000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% set b = range(99999)|list|sort|last %}{% endfor %}",
        "{% set a = 'a'*8000000 ~ 'b' %}{% set b = 'a'*8000000 ~ 'c' %}"
        "{% for i in range(9999) %}{% for i in range(99) %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_a_rendering_that_takes_too_long_is_ended(source: str) -> None:
    with pytest.raises(SlowTemplateError, match=r"more than 0\.2 seconds"):
        render(source, limit_seconds=0.2)


def test_all_that_a_rendering_makes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_BYTES", 1_000_000)
    for source in (
        "{% filter upper %}{% for i in range(99) %}{{ 'x' * 100000 }}{% endfor %}{% endfilter %}",
        "{% set x %}{% for i in range(999) %}" + "z" * 5000 + "{% endfor %}{% endset %}",
        "{% macro f(n) %}{% set x = 'a' * 100000 %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ):
        with pytest.raises(InvalidRequestError, match="more than 1000000 bytes"):
            render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 2**10 }} {{ 7 // 2 }} {{ 'a' * 3 }} {{ 5 % 3 }} {{ [1] + [2] }} {{ (1,) + (2,) }}", "1024 3 aaa 2 [1, 2] (1, 2)"),
        ("{{ '%s=%05.1f%%' % ('a', 2) }}|{{ '%(a)s' % {'a': 1} }}|{{ '%s, %s'|format(1, 2) }}", "a=002.0%|1|1, 2"),
        ("{{ '{0:>5}|{a}|{0!r}'.format('x', a=1) }}{{ '{a[0]}'.format_map({'a': [3]}) }}", "    x|1|'x'3"),
        ("{{ ('<{}>'|safe).format('<') }}", "<&lt;>"),
        ("{{ [1, 'a', none]|join('-') }}{{ ','.join(['x', 'y']) }}{{ [{'a': 1}, {'a': 2}]|join('/', attribute='a') }}", "1-a-Nonex,y1/2"),
        ("{{ 'aXbX'.replace('X', '--') }}{{ 'aaa'|replace('a', 'b', 2) }}{{ 'a' ~ 1 ~ none ~ [1] }}", "a--b--bbaa1None[1]"),
        ("{{ 'a\nb'|indent(2) }}{{ 'a\nb'|indent('>', true) }}{{ 'x'|center(5) }}|", "a\n  b>a\n>b  x  |"),
        ("{{ {'b': [1, 'é'], 'a': none}|tojson }}{{ [1]|tojson(indent=2) }}", '{"b": [1, "é"], "a": null}[\n  1\n]'),
        ("{% set x | upper %}ab{{ 1 }}{% endset %}{{ x }}{% filter trim %} y {% endfilter %}", "AB1y"),
        ("{{ range(3)|map('string')|list }}{{ [3, 1]|sort }}{{ 'a' in ['a'] }}{{ 1 < 2 < 3 }}", "['0', '1', '2'][1, 3]TrueTrue"),
        ("{% set ns = namespace(l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l }}{{ ns.l|tojson }}", "[0, 1, 2][0, 1, 2]"),
        ("{{ 'a b'.rsplit(' ', 1) }}{{ ' x '.strip() }}{{ 'ab'.rfind('b') }}{{ '7'.zfill(3) }}", "['a', 'b']x1007"),
        ("{{ 2.567|round(2) }}{{ '5'|int + 1 }}{{ [1, 2]|sum }}{{ 'a b'|title }}{{ 'a b'|wordcount }}", "2.5763A B2"),
    ],
)  # fmt: skip
def test_what_is_small_is_as_it_always_was(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_weight_counts_what_is_held_twice_twice() -> None:
    once = ["ab", {"c": 1}]
    assert weigh([once, once]) - weigh([]) == 2 * weigh(once)
    assert weigh(WeighedList([1])) < weigh([1])
