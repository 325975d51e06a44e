"""What the commands of `inferq` do and print. Each returns whether it ended badly; errors are the caller's to print."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from .client import InferenceClient
from .commands import CancelOutcome
from .contract import new_request_id
from .errors import InferqError, InvalidRequest, failure
from .events import Delta, Failed, Finished, FinishReason, TerminalEvent
from .fleet import Fleet
from .results import State
from .stream import EventStream

_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "ignore_eos")
_CANCEL_PATIENCE_S: Final = 5.0


class OutputLost(Exception):
    """Whoever read our output has gone, or it cannot be written for another reason."""


async def generate(args: Namespace) -> bool:
    """Stream one answer to stdout as it comes. Interrupted, it cancels the request and says so."""
    request_id = new_request_id() if args.request_id is None else args.request_id
    is_ours = args.request_id is None  # until the queue has taken it, an id of the user's may be another job's
    async with _client(args, model=args.model) as client:
        try:
            await client.submit(_request(args), request_id=request_id)
            is_ours = True
            return await _print_stream(client.stream(request_id), as_json=args.json)
        except asyncio.CancelledError:
            if is_ours:
                await _cancel_and_say(client, request_id)
            raise
        except OutputLost:
            await _cancel_and_say(client, request_id)
            raise


async def cancel(args: Namespace) -> bool:
    """Cancel a request, and print what came of it."""
    async with _client(args) as client:
        outcome = await client.cancel(args.request_id)
    _print({"request_id": args.request_id, "outcome": outcome}, as_json=args.json, text=outcome)
    return outcome is CancelOutcome.UNKNOWN


async def status(args: Namespace) -> bool:
    """Print how far a request is, or who serves what."""
    async with _client(args, model=args.model) as client:
        if args.request_id is None:
            fleet = await client.fleet()
            _print(_fleet_as_json(fleet), as_json=args.json, text=_fleet_as_text(fleet))
            return False
        found = await client.status(args.request_id)
    known = {name: value for name, value in asdict(found).items() if value not in (None, ())}
    lines = "\n".join(f"{name}: {_cell(value)}" for name, value in known.items())
    _print(known, as_json=args.json, text=lines)
    return found.state is State.UNKNOWN


def _client(args: Namespace, model: str | None = None) -> InferenceClient:
    return InferenceClient.from_url(args.redis_url, model=model, prefix=args.prefix)


def _request(args: Namespace) -> dict[str, Any]:
    prompt = args.prompt
    sampling = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    messages = [_message(text) for text in args.message]
    if not messages and not args.chat:
        return {"prompt": prompt, "sampling": sampling}
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
    return {"messages": messages, "sampling": sampling}


def _message(text: str) -> dict[str, str]:
    role, separator, content = text.partition(":")
    if not separator:
        raise InvalidRequest("--message must be ROLE:TEXT")
    return {"role": role, "content": content}


async def _print_stream(events: EventStream, *, as_json: bool) -> bool:
    text = ""
    async for event in events:
        if as_json:
            known = event.model_dump(mode="json", exclude_none=True)
            _write(_dumps({"request_id": events.request_id, "position": events.position, **known}) + "\n")
        elif isinstance(event, Delta) and event.text:
            text = event.text
            _write(text)
        if isinstance(event, Finished | Failed):
            if text and not text.endswith("\n"):
                _write("\n")
            return _ended_badly(events.request_id, event)
    return True


def _ended_badly(request_id: str, event: TerminalEvent) -> bool:
    if isinstance(event, Failed):
        raise failure(request_id, event)
    stopped = {FinishReason.CANCELLED, FinishReason.DEADLINE} & set(event.finish_reasons)
    for reason in stopped:
        _say(f"{request_id} was stopped: {reason}")
    return bool(stopped)


async def _cancel_and_say(client: InferenceClient, request_id: str) -> None:
    try:
        async with asyncio.timeout(_CANCEL_PATIENCE_S):
            outcome = await client.cancel(request_id)
    except (InferqError, TimeoutError) as exc:
        _say(f"could not cancel {request_id}: {exc}")
    else:
        _say(f"interrupted; {request_id}: {'cancelled' if outcome is CancelOutcome.REQUESTED else outcome}")


def _fleet_as_json(fleet: Fleet) -> dict[str, Any]:
    models = [
        {
            "model": each.model,
            "waiting": each.waiting,
            "running": each.running,
            "card": each.card.model_dump(mode="json") if each.card else None,
        }
        for each in fleet.models
    ]
    return {"models": models, "workers": [worker.model_dump(mode="json") for worker in fleet.workers]}


def _fleet_as_text(fleet: Fleet) -> str:
    models = [("MODEL", "WAITING", "RUNNING", "CONTEXT", "WORKERS")]
    for each in fleet.models:
        context = each.card.max_model_len if each.card else None
        num_workers = sum(worker.model == each.model for worker in fleet.workers)
        models.append((each.model, str(each.waiting), str(each.running), str(context or "-"), str(num_workers)))
    workers = [("WORKER", "MODEL", "RUNNING", "SLOTS")]
    workers += [(each.worker, each.model, str(each.running), str(each.slots)) for each in fleet.workers]
    return f"{_table(models)}\n\n{_table(workers)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _print(value: dict[str, Any], *, as_json: bool, text: str) -> None:
    _write((_dumps(value) if as_json else text) + "\n")


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _write(text: str) -> None:
    if sys.stdout is None:  # closed before we started
        raise OutputLost("standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as exc:
        raise OutputLost(f"standard output: {exc.strerror}") from exc


def _say(text: str) -> None:
    sys.stderr.write(f"inferq: {text}\n")
