"""The text side of a model: its folder, prompts and chats to ids, and what a request's output is made of."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import tokenizers as made
from support.chats import render_chat

from inferq.engine.errors import InvalidRequestError
from inferq.engine.request import FinishReason, SamplingParams
from inferq.engine.text import TextProcessor

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "thank you"}]


@pytest.fixture
def text(tmp_path: Path) -> TextProcessor:
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return TextProcessor.load(made.write_folder(tmp_path / "text", made.byte_level(), config=config, template=CHATML))


class TestLoad:
    def test_a_folder_without_a_tokenizer_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
            TextProcessor.load(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer.json", "{}"),
            ("tokenizer.json", "nonsense"),
            ("tokenizer_config.json", "nonsense"),
            ("tokenizer_config.json", "[]"),
            ("tokenizer_config.json", '{"extra_special_tokens": [1]}'),
            ("tokenizer_config.json", '{"chat_template": [1]}'),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"7": null}}'),
            ("special_tokens_map.json", "nonsense"),
        ],
    )
    def test_a_broken_file_is_named(self, tmp_path: Path, name: str, content: str) -> None:
        made.write_folder(tmp_path, made.byte_level())
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="token"):
            TextProcessor.load(tmp_path)

    def test_a_tokenizer_alone_is_enough_for_prompts(self, tmp_path: Path) -> None:
        made.byte_level().save(str(tmp_path / "tokenizer.json"))
        text = TextProcessor.load(tmp_path)
        assert text.encode("so") == made.byte_level().encode("so").ids
        with pytest.raises(InvalidRequestError, match="no chat template"):
            text.encode_chat(USER)

    def test_limits_of_length_and_padding_are_dropped(self, tmp_path: Path) -> None:
        tokenizer = made.byte_level()
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        text = TextProcessor.load(made.write_folder(tmp_path, tokenizer))
        assert text.encode("so it is, is it not?") == made.byte_level().encode("so it is, is it not?").ids

    @pytest.mark.parametrize(
        ("config", "chat"),
        [
            ("{{ 'config' }}", "config"),
            ([{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}], "one"),
            ({"default": "two", "tool_use": "tools"}, "two"),
        ],
    )
    def test_a_template_in_the_configuration(self, tmp_path: Path, config: object, chat: str) -> None:
        text = TextProcessor.load(made.write_folder(tmp_path, made.byte_level(), config={"chat_template": config}))
        assert render_chat(text, USER) == chat
        assert render_chat(text, USER, tools=[]) == ("config" if chat == "config" else "tools")

    def test_template_files_count_more_than_the_configuration(self, tmp_path: Path) -> None:
        folder = made.write_folder(tmp_path, made.byte_level(), config={"chat_template": "config"}, template="file")
        assert render_chat(TextProcessor.load(folder), USER) == "file"
        extra = folder / "additional_chat_templates"
        extra.mkdir()
        (extra / "tool_use.jinja").write_text("tools")
        assert render_chat(TextProcessor.load(folder), USER, tools=[]) == "tools"

    @pytest.mark.parametrize(
        "files",
        [
            {"tokenizer_config.json": {"bos_token": "<s>", "image_token": {"content": "<img>"}}},
            {"special_tokens_map.json": {"bos_token": {"content": "<s>"}, "image_token": "<img>"}},
            {"tokenizer_config.json": {"bos_token": "<s>", "extra_special_tokens": {"image_token": "<img>"}}},
        ],
    )
    def test_named_special_tokens_are_seen_by_templates(self, tmp_path: Path, files: dict[str, object]) -> None:
        made.write_folder(tmp_path, made.byte_level(), template="{{ bos_token }}|{{ image_token }}|{{ eos_token }}")
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        text = TextProcessor.load(tmp_path)
        assert render_chat(text, USER) == "<s>|<img>|"
        assert len(text.encode("<img>")) == 1, "a special token that the tokenizer lacks is added to it"


class TestEncode:
    def test_control_tokens_of_a_prompt_count(self, text: TextProcessor) -> None:
        assert text.encode("<|im_start|>")[0] == made.byte_level().token_to_id("<|im_start|>")

    def test_a_lone_surrogate_is_refused(self, text: TextProcessor) -> None:
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            text.encode("a \ud800 b")
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            text.encode_chat([{"role": "user", "content": "a \ud800 b"}])

    def test_a_zero_character_is_text_like_any_other(self, text: TextProcessor) -> None:
        assert made.byte_level().decode(text.encode("a\0b")) == "a\0b"

    def test_many_threads_may_encode_at_once(self, text: TextProcessor) -> None:
        prompts = [f"so {n} <|im_end|> it is" for n in range(40)]
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        expected = [(text.encode(p), text.encode_chat(c)) for p, c in zip(prompts, chats, strict=True)]
        results: list[object] = []

        def work() -> None:
            results.append([(text.encode(p), text.encode_chat(c)) for p, c in zip(prompts, chats, strict=True)])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4


class TestOutput:
    def test_sampling_decides_what_is_shown(self, text: TextProcessor) -> None:
        token_ids = text.encode("so<|im_end|> it is")
        assert text.output(SamplingParams()).push(token_ids, FinishReason.LENGTH).text == "so it is"
        whole = text.output(SamplingParams(skip_special_tokens=False))
        assert whole.push(token_ids, FinishReason.LENGTH).text == "so<|im_end|> it is"
        stopped = text.output(SamplingParams(stop=("t i",), include_stop_str_in_output=True))
        assert stopped.push(token_ids, None).text == "so it i"

    def test_outputs_do_not_touch_each_other(self, text: TextProcessor) -> None:
        one, other = (text.output(SamplingParams(stop=("is",))) for _ in range(2))
        assert one.push(text.encode("it i"), None).text == "it "
        assert other.push(text.encode("so"), None).text in ("so", "")
        assert one.push(text.encode("s"), None).finish_reason is FinishReason.STOP

    def test_a_stop_string_that_is_a_special_token_has_its_id(self, text: TextProcessor) -> None:
        assert text.special_stop_ids(["so", "<|im_end|>", "<tool>", "<|im_end|> "]) == (2,)

    def test_such_a_stop_string_is_found_although_it_is_never_shown(self, text: TextProcessor) -> None:
        sampling = SamplingParams(stop=("<|im_end|>",), ignore_eos=True)
        token_ids = text.encode("so<|im_end|>")
        (stop_id,) = text.special_stop_ids(sampling.stop)
        assert token_ids[-1] == stop_id, "the engine ends the request with this token"
        assert text.output(sampling).push(token_ids, FinishReason.STOP).text == "so"
        shown = SamplingParams(stop=("<|im_end|>",), ignore_eos=True, include_stop_str_in_output=True)
        assert text.output(shown).push(token_ids, FinishReason.STOP).text == "so<|im_end|>"

    def test_no_prompt_is_shorter_than_its_tokens_allow(self, text: TextProcessor) -> None:
        for line in made.CORPUS:
            assert len(line) <= len(text.encode(line)) * text.max_token_chars


def test_no_model_library_is_loaded(tmp_path: Path) -> None:
    made.write_folder(tmp_path, made.byte_level(), template=CHATML)
    code = f"""if True:
        import sys
        from inferq.engine.text import TextProcessor
        assert TextProcessor.load({str(tmp_path)!r}).encode_chat([{{"role": "user", "content": "so"}}])
        print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
