"""Chat templates: what they may not do, and what becomes of their errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from inferq.engine import sandbox, template
from inferq.engine.errors import InvalidRequestError
from inferq.engine.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages or USER, **fields)


class TestSandbox:
    """A template comes with a download: it must not reach beyond its messages."""

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception.__globals__['__builtins__']['open'](PATH, 'w') }}",
            "{{ strftime_now.__globals__['json'].codecs.open(PATH, 'w') }}",
            "{{ lipsum.__globals__['os'].open(PATH, 577) }}",
            "{{ cycler.__init__.__globals__.os.popen('touch ' ~ PATH).read() }}",
            "{{ (lipsum|attr('__globals__'))['os'].open(PATH, 577) }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ raise_exception('reached') }}",
            "{{ '{0.__class__.__base__.__subclasses__}'.format(PATH).split('method')[1] }}",
            "{{ self.__init__.__globals__.__builtins__.open(PATH, 'w') }}",
            "{{ messages.__class__.__init__.__globals__.__builtins__.open(PATH, 'w') }}",
            "{{ namespace(__html__=1) }}",
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            "{{ dict.update(messages[0], role='system') }}",
            "{{ dict.mro()[1].__subclasses__() }}",
            "{{ dict.fromkeys.__globals__.__builtins__.open(PATH, 'w') }}",
            "{{ dict.fromkeys.__func__.__globals__ }}{{ raise_exception('reached') }}",
            "{% set _ = messages.append(1) %}",
            "{% set _ = messages[0].update({'role': 'system'}) %}",
            "{% include PATH %}",
            "{% import PATH as other %}",
        ],
    )
    def test_a_template_that_reaches_out_is_refused(self, source: str, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        with pytest.raises(InvalidRequestError) as caught:
            render(source.replace("PATH", repr(str(marker))))
        assert "reached" not in str(caught.value)
        assert not marker.exists()

    def test_messages_come_out_unchanged(self) -> None:
        messages = [{"role": "user", "content": None, "reasoning": "because", "parts": [1]}]
        assert render("{{ messages[0] }}", messages) == (
            "{'thinking': 'because', 'role': 'user', 'reasoning': 'because', 'parts': [1], "
            "'reasoning_content': 'because'}"
        )
        assert messages == [{"role": "user", "content": None, "reasoning": "because", "parts": [1]}]


class TestBounds:
    """No template runs for ever or fills the memory with its text."""

    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) if false %}{% endfor %}" * 20,
            "{% set big = range(90000)|list %}{% for a in big %}{% for b in big %}{% set c = loop.length %}{% endfor %}"
            "{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "{% for a in range(9) recursive %}{% if loop.depth < 60 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
            "{% for a in range(3) recursive %}{% if loop.depth < 2 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
        ],
    )
    def test_a_loop_without_end_is_ended(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)
        with pytest.raises(InvalidRequestError, match="more than 200000 steps"):
            render(source)

    def test_the_steps_of_one_rendering_are_not_those_of_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
        one = ChatTemplate({"default": "{% for a in range(60) %}.{% endfor %}"}, {})
        assert [one.render(USER) for _ in range(3)] == ["." * 60] * 3

    def test_a_text_without_end_is_ended(self) -> None:
        with pytest.raises(InvalidRequestError, match=f"more than {template.MAX_RENDERED_CHARS} characters"):
            render("{% for a in range(9999) %}{{ 'x' * 10000 }}{% endfor %}")

    def test_a_macro_that_calls_itself_for_ever_is_ended(self) -> None:
        with pytest.raises(InvalidRequestError, match="RecursionError"):
            render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")

    def test_a_message_of_an_error_is_kept_short(self) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            render("{{ raise_exception('x' * 100000) }}")
        assert len(str(caught.value)) < 1000


class TestErrors:
    """What goes wrong in a template is told in its own words."""

    def test_the_template_refuses(self) -> None:
        source = "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
        assert render(source) == "ok"
        with pytest.raises(InvalidRequestError, match=r"roles must alternate$"):
            render(source, USER * 2)

    def test_the_content_is_missing(self) -> None:
        with pytest.raises(InvalidRequestError, match="content"):
            render("{{ '<' + messages[0].content + '>' }}", [{"role": "assistant", "content": None}])

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ messages[0].content.index('z') }}", "ValueError"),
            ("{{ range(1000000) }}", "Range too big"),
            ("{{ nothing.at.all }}", "'nothing' is undefined"),
            ("{{ messages|map('nonsense')|list }}", "nonsense"),
        ],
    )
    def test_the_template_fails(self, source: str, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            render(source)
        assert "Traceback" not in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_template_is_not_valid(self) -> None:
        broken = ChatTemplate({"default": "{% if %}", "tool_use": "{{ messages[0].content }}"}, {})
        with pytest.raises(InvalidRequestError, match="not valid"):
            broken.render(USER)
        assert broken.render(USER, tools=[]) == "hi"

    def test_there_is_no_template(self) -> None:
        with pytest.raises(InvalidRequestError, match="no chat template: send a prompt"):
            ChatTemplate({}, {}).render(USER)

    def test_there_is_no_default_template(self) -> None:
        with pytest.raises(InvalidRequestError, match="named default, only rag, tool_use"):
            ChatTemplate({"tool_use": "", "rag": ""}, {}).render(USER)

    def test_there_are_no_messages(self) -> None:
        with pytest.raises(InvalidRequestError, match="must not be empty"):
            ChatTemplate({"default": ""}, {}).render([])


def test_many_threads_may_render_at_once() -> None:
    chat = ChatTemplate({"default": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}, {})
    texts: dict[int, set[str]] = {}
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        texts[number] = {chat.render([{"content": f"{number}"}] * 20) for _ in range(50)}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: {f"[{number}]" * 20} for number in range(4)}
