"""`inferq chat`: a conversation in a terminal. Ctrl-C stops an answer, Ctrl-D leaves.

Without a terminal each line of stdin is a message of the user's.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import suppress
from typing import Final

from .cli_output import no_worker, sampling_of, say, write
from .contract import new_request_id
from .errors import InferqError, failure
from .events import Delta, Failed, NoWorker, StreamEvent
from .sync import SyncInferenceClient

_PROMPT: Final = "> "

_Messages = list[dict[str, str]]


def chat(args: Namespace) -> bool:
    """Answer line after line; says whether the last answer failed."""
    messages: _Messages = [{"role": "system", "content": args.system}] if args.system else []
    failed = False
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and its editing keys
    with SyncInferenceClient(args.redis_url, model=args.model, prefix=args.prefix) as client:
        conversation = _Conversation(client, args, messages)
        while (line := _ask()) is not None:
            if line.strip():
                failed = not conversation.answer(line)
    return failed


def _ask() -> str | None:
    """The next line; None at the end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            return input(_PROMPT if is_terminal else "")
        except EOFError:
            if is_terminal:
                write("\n")
            return None
        except KeyboardInterrupt:
            write("\n")
            say("Ctrl-D leaves")


class _Conversation:
    def __init__(self, client: SyncInferenceClient, args: Namespace, messages: _Messages) -> None:
        self._client = client
        self._sampling = sampling_of(args)
        self._messages = messages

    def answer(self, line: str) -> bool:
        """Print the answer to a message as it comes, and remember both. A message that fails is forgotten."""
        asked = [*self._messages, {"role": "user", "content": line}]
        request_id, texts = new_request_id(), list[str]()
        try:
            self._print_answer(request_id, asked, texts)
        except KeyboardInterrupt:
            self._client.cancel(request_id)
            _end_line(texts)
            say("stopped")
        except InferqError as exc:
            _end_line(texts)
            say(" ".join(str(exc).split()))
            return False
        else:
            _end_line(texts)
        self._messages = [*asked, {"role": "assistant", "content": "".join(texts)}]
        return True

    def _print_answer(self, request_id: str, messages: _Messages, texts: list[str]) -> None:
        """The texts that were printed are put into `texts`."""
        self._client.submit(
            messages=messages, sampling=self._sampling, request_id=request_id, cancel_on_disconnect=True
        )
        for event in self._client.stream(request_id):
            self._print_event(request_id, event, texts)

    @staticmethod
    def _print_event(request_id: str, event: StreamEvent, texts: list[str]) -> None:
        match event:
            case Delta():
                texts.append(event.text)
                write(event.text)
            case NoWorker():
                say(no_worker(event))
            case Failed():
                raise failure(request_id, event)
            case _:
                pass


def _end_line(texts: list[str]) -> None:
    if texts and not texts[-1].endswith("\n"):
        write("\n")
