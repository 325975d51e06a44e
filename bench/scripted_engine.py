"""A stand-in for the engine's child: everything of the real one but the model. For queue tests and benchmarks.

    INFERQ_ENGINE_COMMAND="python bench/scripted_engine.py --step-ms 20"

The parent appends `--fd N --config JSON` as it does for the real child. Pipe, step loop, scheduler and block pool are
the engine's own; the forward pass is a sleep of `--step-ms`, and the next token a checksum of all tokens before it, so
that a text depends on its prompt alone, and a request that is taken up again from prompt and output goes on as before.
`continuation` says what comes after a prompt; `--print PROMPT` prints it. Loads no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine_trace import Trace

from inferq.engine.config import EngineConfig
from inferq.engine.core import EngineCore
from inferq.engine.errors import InvalidRequestError
from inferq.engine.pipe import Abort, Add, Down, PipeError, Ready
from inferq.engine.process import LogSink, argument_parser, ignore_signals, leave, serve
from inferq.engine.scheduler import Output
from inferq.engine.sequence import Scheduled
from inferq.engine.sequence import Sequence as EngineSequence

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 258
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
_TEXT_VERSION = 1
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checksum(token_ids: Iterable[int], start: int = 0) -> int:
    """CRC-32 of the ids as unsigned 32-bit numbers; `start` is the checksum of those before."""
    return zlib.crc32(array("I", token_ids).tobytes(), start)


def token_after(crc: int, eos_one_in: int = 0) -> int:
    """The token that follows tokens of that checksum: a printable ASCII byte, or once in a while the end."""
    if eos_one_in and crc // 95 % eos_one_in == 0:
        return EOS_TOKEN_ID
    return 32 + crc % 95


def continuation(prompt_token_ids: Sequence[int], count: int, *, eos_one_in: int = 0) -> list[int]:
    """The `count` tokens that this engine generates after a prompt with ignore_eos; without, it ends at the first 258.

    The id of a byte is its value: `bytes(continuation(list(prompt.encode()), 16)).decode()` is the text.
    """
    token_ids: list[int] = []
    crc = checksum(prompt_token_ids)
    for _ in range(count):
        token_ids.append(token_after(crc, eos_one_in))
        crc = checksum(token_ids[-1:], crc)
    return token_ids


class Tokens(list[int]):
    """A step that has run when it is launched."""

    def tokens(self) -> list[int]:
        return self


class ScriptedRunner:
    """Sleeps for its forward pass, and fails as told."""

    lookahead = 0

    def __init__(self, options: argparse.Namespace, facts: Ready, trace: Trace | None) -> None:
        self.facts = facts
        self._trace = trace
        self._options = options
        self._steps = 0
        self._checksums: dict[int, tuple[int, int]] = {}

    def launch(self, scheduled: Sequence[Scheduled]) -> Tokens:
        self._fail(scheduled)
        self._steps += 1
        time.sleep(self._options.step_ms / 1000 / self._options.tokens_per_step)
        # Kept for the sequences of this step alone: whoever was left out is summed up anew when it comes back.
        self._checksums = {each.sequence.key: self._sum(each.sequence) for each in scheduled}
        eos_one_in = self._options.eos_one_in
        if self._trace is not None:
            self._trace.tokens(each.sequence for each in scheduled if each.samples)
        return Tokens(
            token_after(self._checksums[each.sequence.key][1], eos_one_in) for each in scheduled if each.samples
        )

    def _sum(self, sequence: EngineSequence) -> tuple[int, int]:
        length, crc = self._checksums.get(sequence.key, (0, 0))
        return len(sequence.token_ids), checksum(sequence.token_ids[length:], crc)

    def _fail(self, scheduled: Sequence[Scheduled]) -> None:
        options = self._options
        if self._is_due(options.exit_after, options.exit_on_text, scheduled):
            os._exit(options.exit_code)
        if self._is_due(options.hang_after, options.hang_on_text, scheduled):
            threading.Event().wait()
        if self._is_due(options.garbage_after, "", scheduled):
            os.write(options.fd, b"\xff" * 64)
        if self._is_due(options.raise_after, options.raise_on_text, scheduled):
            raise RuntimeError("the scripted engine was told to fail in this step")

    def _is_due(self, after: int, text: str, scheduled: Sequence[Scheduled]) -> bool:
        at_token = self._options.poison_at_token
        old_enough = [each for each in scheduled if each.sequence.num_output_tokens >= at_token]
        return (self._steps == after or _any_prompt_has(text, old_enough)) and self._may_fail()

    def _may_fail(self) -> bool:
        """False where this failure is to happen once, and has."""
        if not self._options.once:
            return True
        try:
            Path(self._options.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class ScriptedCore(EngineCore):
    """The engine's own loop; `--tokens-per-step` runs several of its steps and reports them as one."""

    def __init__(self, options: argparse.Namespace, trace: Trace | None, *parts: Any) -> None:
        super().__init__(*parts)
        self.options = options
        self.trace = trace

    def step(self) -> list[Output]:
        merged: dict[int, Output] = {}
        for _ in range(self.options.tokens_per_step):
            if self.scheduler.has_work:
                for output in super().step():
                    before = merged[output.key].token_ids if output.key in merged else []
                    merged[output.key] = output._replace(token_ids=before + output.token_ids)
        return list(merged.values())

    def admit(self, message: Add) -> None:
        if _has_text(self.options.refuse_text, message.prompt_token_ids):
            raise InvalidRequestError("the scripted engine was told to refuse this prompt")
        if self.trace is not None:
            self.trace.admitted(message.key, message.prompt_token_ids)
        super().admit(message)

    def _apply(self, message: Down | PipeError) -> None:
        super()._apply(message)
        if self.trace is not None and isinstance(message, Abort):
            self.trace.freed(message.key)


def _any_prompt_has(text: str, scheduled: Sequence[Scheduled]) -> bool:
    return bool(text) and any(
        _has_text(text, each.sequence.token_ids[: each.sequence.num_prompt_tokens]) for each in scheduled
    )


def _has_text(text: str, token_ids: Sequence[int]) -> bool:
    return bool(text) and text.encode() in bytes(token_id for token_id in token_ids if 0 <= token_id < 256)


def load(options: argparse.Namespace, trace: Trace | None, log: LogSink) -> ScriptedRunner:
    config = EngineConfig.from_json(options.config)
    time.sleep(options.load_ms / 1000)
    if options.fail_load:
        raise RuntimeError(options.fail_load)
    facts = Ready(
        model=config.model,
        text_dir=str(text_folder(config.cache_dir)),
        eos_token_ids=[EOS_TOKEN_ID],
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or options.context,
        num_blocks=config.num_blocks or options.blocks,
        block_size=options.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype="float32",
        device="cpu",
        attention=options.attention if config.attention == "auto" else config.attention,
    )
    log("info", "scripted_engine_loaded", step_ms=options.step_ms, tokens_per_step=options.tokens_per_step)
    return ScriptedRunner(options, facts, trace)


def text_folder(cache_dir: str | None) -> Path:
    """A folder with a byte-level tokenizer.json (the id of a byte is its value) and a ChatML template; made once."""
    cache = Path(cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferq")
    folder = cache / f"scripted-text-{_TEXT_VERSION}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="scripted-text-", dir=cache))
        write_text_files(made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was quicker, with the same files.
            shutil.rmtree(made)
    return folder


def write_text_files(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_level_chars())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _byte_level_chars() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it is visible."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]


def parser() -> argparse.ArgumentParser:
    parser = argument_parser()
    parser.prog, parser.description = "scripted_engine.py", "the engine's process without a model"
    add = parser.add_argument
    add("--step-ms", type=float, default=0.0, help="how long a step takes")
    add("--tokens-per-step", type=int, default=1, help="tokens that each sequence gets in a step")
    add("--load-ms", type=float, default=0.0, help="how long loading takes")
    add("--eos-one-in", type=int, default=0, help="one token in N is the end of sequence; 0: none ever")
    add("--context", type=int, default=32768, help="max_model_len where the configuration names none")
    add("--blocks", type=int, default=16384, help="num_blocks where the configuration names none")
    add("--block-size", type=int, default=16)
    add("--attention", default="scripted", metavar="NAME", help="what `auto` comes to")
    add("--fail-load", default="", metavar="MESSAGE", help="fail to load")
    add("--refuse-text", default="", metavar="TEXT", help="refuse prompts with this in them")
    add("--exit-code", type=int, default=70, help="of the exits below")
    for name, what in (("exit", "exit"), ("hang", "hang"), ("raise", "raise an error")):
        add(f"--{name}-after", type=int, default=-1, metavar="N", help=f"{what} in the step after N steps")
        add(f"--{name}-on-text", default="", metavar="TEXT", help=f"{what} in a step with this in a prompt")
    add("--garbage-after", type=int, default=-1, metavar="N", help="write what is no frame after N steps")
    add("--poison-at-token", type=int, default=0, metavar="N", help="a prompt's text fails only from N tokens on")
    add("--trace", default="", metavar="FILE", help="append when each token was made and each abort's blocks were free")
    add("--once", default="", metavar="FILE", help="fail only where FILE is not there yet, and make it")
    return parser


def print_continuation(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripted_engine.py")
    parser.add_argument("--print", dest="prompt", required=True, metavar="PROMPT")
    parser.add_argument("--count", type=int, default=16, help="tokens")
    options = parser.parse_args(arguments)
    print(bytes(continuation(list(options.prompt.encode()), options.count)).decode())


def main() -> None:
    if "--print" in sys.argv:
        print_continuation(sys.argv[1:])
        return
    ignore_signals()
    options = parser().parse_args()
    trace = Trace(options.trace) if options.trace else None
    leave(serve(options.fd, partial(load, options, trace), partial(ScriptedCore, options, trace)))


if __name__ == "__main__":
    main()
