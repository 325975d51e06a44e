"""`inferq dead`: what failed for a reason that somebody should look into. Prompts are shown only when asked for."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from .cli_output import dumps, print_value, table, write
from .client import InferenceClient
from .dead_letters import DeadLetter


async def dead_list(args: Namespace) -> bool:
    """Print the last dead letters, the latest first."""
    async with _client(args) as client:
        letters = await client.dead_letters(limit=args.limit)
    if args.json:
        write("".join(dumps(_as_json(letter)) + "\n" for letter in letters))
    else:
        rows = [("ID", "REASON", "ATTEMPTS", "DIED")]
        rows += [(each.request_id, each.reason, str(each.attempts), _time(each)) for each in letters]
        write(table(rows) + "\n")
    return False


async def dead_show(args: Namespace) -> bool:
    """Print one letter, and with --payload what was asked for."""
    async with _client(args) as client:
        letter, request = await client.dead_letter(args.request_id)
    shown = _as_json(letter) | {"payload_kept": request is not None}
    if args.payload and request is not None:
        shown["request"] = request.model_dump(mode="json", exclude_defaults=True)
    lines = (f"{name}: {dumps(value) if isinstance(value, dict) else value}" for name, value in shown.items())
    print_value(shown, as_json=args.json, text="\n".join(lines))
    return False


async def dead_requeue(args: Namespace) -> bool:
    """Enqueue the request again and print its new id."""
    async with _client(args) as client:
        new_id = await client.requeue(args.request_id)
    print_value({"request_id": new_id, "requeued": args.request_id}, as_json=args.json, text=new_id)
    return False


def _client(args: Namespace) -> InferenceClient:
    return InferenceClient.from_url(args.redis_url, model=args.model, prefix=args.prefix)


def _as_json(letter: DeadLetter) -> dict[str, Any]:
    known = asdict(letter)
    del known["entry_id"], known["signature"]
    return known | {"died_at": _time(letter)}


def _time(letter: DeadLetter) -> str:
    return datetime.fromtimestamp(letter.died_at_ms / 1000, UTC).isoformat(timespec="seconds")
