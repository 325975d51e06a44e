"""The stand-in without a model: its texts are what it says they are, and it fails as told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.child import scripted_child
from support.scripted import EOS_TOKEN_ID, SCRIPTED_ENGINE, VOCAB_SIZE, continuation, text_folder
from tokenizers import Tokenizer

from inferq.engine.pipe import Add, Fatal, PipeError, Refused, Step


def add(key: int, text: str, max_tokens: int = 8, **sampling: object) -> Add:
    return Add(key, list(text.encode()), {"max_tokens": max_tokens, "ignore_eos": True, **sampling})


def test_a_continuation_depends_on_the_prompt_alone_and_goes_on_from_any_point_of_itself() -> None:
    prompt = list(b"once upon a time")
    whole = continuation(prompt, 50)
    assert all(32 <= token_id < 127 for token_id in whole)
    assert continuation(prompt + whole[:20], 30) == whole[20:]
    assert continuation(list(b"twice upon a time"), 50) != whole


def test_the_process_says_what_the_function_says_through_batches_chunks_and_preemption() -> None:
    texts = [f"prompt number {number} " * (number + 1) for number in range(12)]
    with scripted_child(max_num_seqs=4, num_blocks=24, max_num_batched_tokens=40) as child:
        child.send(*[add(key, text, 60) for key, text in enumerate(texts)])
        child.until(lambda: all(child.finish_reason(key) for key in range(12)))
        for key, text in enumerate(texts):
            assert child.tokens(key) == continuation(list(text.encode()), 60)
        assert child.all(Step)[-1].stats.preemptions > 0


def test_tokens_per_step_come_in_one_message_and_the_last_one_is_cut() -> None:
    with scripted_child("--tokens-per-step", "3") as child:
        child.send(add(1, "hi", 8))
        child.until(lambda: child.finish_reason(1))
        assert [len(step.outputs[0][1]) for step in child.all(Step)] == [3, 3, 2]
        assert child.tokens(1) == continuation(list(b"hi"), 8)


def test_one_token_in_so_many_is_the_end() -> None:
    with scripted_child("--eos-one-in", "10") as child:
        child.send(*[add(key, f"story {key}", 1000, ignore_eos=False) for key in range(20)])
        child.until(lambda: all(child.finish_reason(key) for key in range(20)))
        for key in range(20):
            expected = continuation(list(f"story {key}".encode()), 1000, eos_one_in=10)
            assert child.tokens(key) == expected[: expected.index(EOS_TOKEN_ID) + 1]
            assert child.finish_reason(key) == "stop"


def test_its_tokenizer_has_a_byte_for_each_id_and_its_special_tokens(tmp_path: Path) -> None:
    folder = text_folder(str(tmp_path))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "Zażółć 🦙\n\tq"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_end|>").ids == [ord("a"), EOS_TOKEN_ID]
    assert text_folder(str(tmp_path)) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_prompt_can_be_refused_beside_others() -> None:
    with scripted_child("--refuse-text", "poison") as child:
        child.send(add(1, "some poison"), add(2, "water"))
        child.until(lambda: child.finish_reason(2))
        assert [refused.key for refused in child.all(Refused)] == [1]


@pytest.mark.parametrize("flags", [("--exit-after", "3"), ("--exit-on-text", "poison")])
def test_it_exits_as_told(flags: tuple[str, str]) -> None:
    with scripted_child(*flags, "--exit-code", "9") as child:
        child.send(add(1, "water", 2))
        child.until(lambda: child.finish_reason(1))
        child.send(add(2, "a poison"))
        child.read_to_the_end()
        assert child.process.wait(10) == 9
        assert not child.all(Fatal)


@pytest.mark.parametrize("flags", [("--raise-after", "2"), ("--raise-on-text", "poison")])
def test_it_fails_in_a_step_as_told(flags: tuple[str, str]) -> None:
    with scripted_child(*flags) as child:
        child.send(add(1, "water", 2))
        child.until(lambda: child.finish_reason(1))
        child.send(add(2, "a poison"))
        assert isinstance(child.read_to_the_end()[-1], Fatal)


def test_it_hangs_as_told_and_hears_no_abort() -> None:
    with scripted_child("--hang-on-text", "poison") as child:
        child.send(add(1, "water", 2))
        child.until(lambda: child.finish_reason(1))
        child.send(add(2, "a poison"))
        child.send(*[add(9, "later"), add(10, "later")])
        with pytest.raises(TimeoutError):
            child.until(lambda: child.tokens(9), timeout=0.5)
        assert child.process.poll() is None


def test_it_writes_garbage_as_told() -> None:
    with scripted_child("--garbage-after", "2") as child:
        child.send(add(1, "water", 50))
        with pytest.raises(PipeError):
            child.until(lambda: child.finish_reason(1))


def test_the_command_line_prints_what_comes_after_a_prompt() -> None:
    command = [sys.executable, str(SCRIPTED_ENGINE), "--print", "hello", "--count", "20"]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    assert printed == bytes(continuation(list(b"hello"), 20)).decode() + "\n"


def test_a_poison_works_when_its_output_is_long_enough_also_where_that_came_from_an_earlier_run() -> None:
    flags = ("--exit-on-text", "poison", "--poison-at-token", "5", "--exit-code", "9")
    prompt = list(b"a poison")
    whole = continuation(prompt, 5)
    for generated in ([], whole):
        with scripted_child(*flags) as child:
            child.send(Add(1, prompt, {"max_tokens": 20, "ignore_eos": True}, generated))
            child.read_to_the_end()
            assert child.process.wait(10) == 9
            tokens = generated + child.tokens(1)
            assert tokens == whole[: len(tokens)], "what was not on its way yet goes down with it"


def test_a_failure_may_come_once(tmp_path: Path) -> None:
    flags = ("--raise-on-text", "poison", "--once", str(tmp_path / "failed"))
    with scripted_child(*flags) as child:
        child.send(add(1, "a poison"))
        assert isinstance(child.read_to_the_end()[-1], Fatal)
    with scripted_child(*flags) as child:
        child.send(add(1, "a poison"))
        child.until(lambda: child.finish_reason(1))
