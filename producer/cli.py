"""`inferq`: the flags, the exit codes, and nothing of what the commands do.

Errors are one line on stderr. Exit codes: 0 done; 1 the request failed, was stopped, is unknown or not taken on now;
2 wrong usage or an invalid request; 3 Redis cannot be reached; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import io
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from .cli_chat import chat
from .cli_commands import cancel, generate, status, tail
from .cli_dead import dead_list, dead_requeue, dead_show
from .cli_output import OutputLost, lose, say
from .connection import DEFAULT_URL
from .errors import (
    InferqError,
    InvalidRequest,
    InvalidSigningKey,
    RedisUnavailable,
    UnknownModel,
    UnsuitableConnection,
)

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if sys.stderr is None:  # closed before we started: argparse would take stdout for it
        sys.stderr = open(os.devnull, "w")
    parser = _parser()
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still gets the others
    try:
        if getattr(args, "prompt", None) == "-":
            args.prompt = _read_stdin(parser)  # before the loop runs, so that Ctrl-C ends the waiting
        work = args.command(args)
        ended_badly = asyncio.run(_interruptible(work)) if inspect.iscoroutine(work) else work
        return FAILED if ended_badly else OK
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    except OutputLost as exc:
        if sys.stdout is not None:
            lose(sys.stdout)
        return FAILED if isinstance(exc.__cause__, BrokenPipeError) else _complain(exc, FAILED)
    except RedisUnavailable as exc:
        return _complain(exc, UNREACHABLE)
    except (InvalidRequest, InvalidSigningKey, UnknownModel, UnsuitableConnection) as exc:
        return _complain(exc, USAGE)
    except InferqError as exc:
        return _complain(exc, FAILED)


async def _interruptible(work: Coroutine[Any, Any, bool]) -> bool:
    """Ctrl-C cancels the work between two of its steps.

    asyncio's own handler may do so in the middle of one, and where that step then enters an `asyncio.timeout` which
    expires at once, as redis-py's do, the interrupt is taken for the timeout and is lost.
    """
    task = asyncio.current_task()
    if task is not None:
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not on Windows, nor outside of the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    return await work


def _read_stdin(parser: argparse.ArgumentParser) -> str:
    if sys.stdin is None:
        parser.error("the prompt is to be read from stdin, which is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        parser.error(f"stdin is not {exc.encoding}: {exc.reason} at byte {exc.start}")


def _complain(error: Exception, code: int) -> int:
    say(" ".join(str(error).split()))
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--redis-url", metavar="URL", help=f"default: $INFERQ_REDIS_URL, else {DEFAULT_URL}")
    common.add_argument("--prefix", default="inferq", help="of the key names; default: %(default)s")
    common.add_argument("--json", action="store_true", help="print JSON, one object a line")
    parser = argparse.ArgumentParser(
        prog="inferq",
        description="Enqueue generation jobs, stream their answers, cancel them.",
        epilog="Exit codes: 0 done, 1 failed or stopped, 2 invalid, 3 Redis cannot be reached, 130 interrupted.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", parents=[common], help="enqueue a request and stream its answer"))
    _add_chat(commands.add_parser("chat", parents=[common], help="talk to a model; Ctrl-C stops an answer"))
    one = commands.add_parser("tail", parents=[common], help="stream the answer of a request that is there already")
    one.add_argument("request_id", metavar="ID")
    one.add_argument("--position", default="0", metavar="P", help="where to go on; default: from the start")
    one.set_defaults(command=tail)
    one = commands.add_parser("cancel", parents=[common], help="stop a request wherever it is")
    one.add_argument("request_id", metavar="ID")
    one.set_defaults(command=cancel)
    look = commands.add_parser("status", parents=[common], help="how far a request is; without an id: who serves what")
    look.add_argument("request_id", metavar="ID", nargs="?")
    look.add_argument("--model", help="a model to show even while no worker serves it; default: $INFERQ_MODEL")
    look.set_defaults(command=status)
    _add_dead(commands.add_parser("dead", help="jobs that failed for a reason to look into"), common)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="text to go on from; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message of a chat")
    parser.add_argument(
        "--message",
        action="append",
        default=[],
        metavar="ROLE:TEXT",
        help="a message of a chat, before the prompt; may be given several times",
    )
    _add_model(parser)
    parser.add_argument("--request-id", metavar="ID", help="1 to 64 letters, digits, _ and -; default: a new one")
    _add_sampling(parser)
    parser.set_defaults(command=generate)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message, before everything else")
    _add_sampling(parser)
    parser.set_defaults(command=chat)


def _add_dead(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    several = verbs.add_parser("list", parents=[common], help="the last ones, the latest first")
    several.add_argument("--limit", type=int, default=100, metavar="N", help="default: %(default)s")
    several.set_defaults(command=dead_list)
    one = verbs.add_parser("show", parents=[common], help="one of them")
    one.add_argument("--payload", action="store_true", help="show what was asked for, the prompt too")
    one.set_defaults(command=dead_show)
    again = verbs.add_parser("requeue", parents=[common], help="enqueue it again, under a new id, which is printed")
    again.set_defaults(command=dead_requeue)
    for verb in (one, again):
        verb.add_argument("request_id", metavar="ID")
    for verb in (several, one, again):
        _add_model(verb)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="served name; default: $INFERQ_MODEL, else the only one that is served")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="default: the room left in the context")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default: 1")
    sampling.add_argument("--top-p", type=float, metavar="P", help="default: 1, off")
    sampling.add_argument("--top-k", type=int, metavar="K", help="default: 0, off")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be given several times")
    sampling.add_argument("--seed", type=int, metavar="N", help="default: drawn for each request")
    sampling.add_argument("--ignore-eos", action="store_const", const=True, help="go on after an end-of-text token")


if __name__ == "__main__":
    sys.exit(main())
