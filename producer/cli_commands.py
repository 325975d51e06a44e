"""What the commands of `inferq` do and print. Each returns whether it ended badly; errors are the caller's to print."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import asdict
from typing import Any, Final

from .cli_output import OutputLost, cell, dumps, no_worker, print_value, sampling_of, say, table, write
from .client import InferenceClient
from .commands import CancelOutcome
from .contract import new_request_id
from .errors import InferqError, InvalidRequest, failure
from .events import Delta, Failed, Finished, FinishReason, NoWorker, TerminalEvent
from .fleet import Fleet
from .results import State
from .stream import EventStream

_CANCEL_PATIENCE_S: Final = 5.0


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


async def tail(args: Namespace) -> bool:
    """Stream the answer of a request that anybody has submitted. Interrupted, it leaves the request alone."""
    async with _client(args) as client:
        events = client.stream(args.request_id, args.position)
        try:
            return await _print_stream(events, as_json=args.json)
        except asyncio.CancelledError:
            say(f"interrupted; {args.request_id} goes on: read on with --position {events.position}")
            raise


async def cancel(args: Namespace) -> bool:
    """Cancel a request, and print what came of it."""
    async with _client(args) as client:
        outcome = await client.cancel(args.request_id)
    print_value({"request_id": args.request_id, "outcome": outcome}, as_json=args.json, text=outcome)
    return outcome is CancelOutcome.UNKNOWN


async def status(args: Namespace) -> bool:
    """Print how far a request is, or who serves what."""
    async with _client(args, model=args.model) as client:
        if args.request_id is None:
            fleet = await client.fleet()
            print_value(_fleet_as_json(fleet), as_json=args.json, text=_fleet_as_text(fleet))
            return False
        found = await client.status(args.request_id)
    known = {name: value for name, value in asdict(found).items() if value not in (None, ())}
    lines = "\n".join(f"{name}: {cell(value)}" for name, value in known.items())
    print_value(known, as_json=args.json, text=lines)
    return found.state is State.UNKNOWN


def _client(args: Namespace, model: str | None = None) -> InferenceClient:
    return InferenceClient.from_url(args.redis_url, model=model, prefix=args.prefix)


def _request(args: Namespace) -> dict[str, Any]:
    prompt = args.prompt
    sampling = sampling_of(args)
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
            write(dumps({"request_id": events.request_id, "position": events.position, **known}) + "\n")
        elif isinstance(event, NoWorker):
            say(no_worker(event))
        elif isinstance(event, Delta) and event.text:
            text = event.text
            write(text)
        if isinstance(event, Finished | Failed):
            if text and not text.endswith("\n"):
                write("\n")
            return _ended_badly(events.request_id, event)
    return True


def _ended_badly(request_id: str, event: TerminalEvent) -> bool:
    if isinstance(event, Failed):
        raise failure(request_id, event)
    stopped = {FinishReason.CANCELLED, FinishReason.DEADLINE} & set(event.finish_reasons)
    for reason in stopped:
        say(f"{request_id} was stopped: {reason}")
    return bool(stopped)


async def _cancel_and_say(client: InferenceClient, request_id: str) -> None:
    try:
        async with asyncio.timeout(_CANCEL_PATIENCE_S):
            outcome = await client.cancel(request_id)
    except (InferqError, TimeoutError) as exc:
        say(f"could not cancel {request_id}: {exc}")
    else:
        say(f"interrupted; {request_id}: {'cancelled' if outcome is CancelOutcome.REQUESTED else outcome}")


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
        num_workers = sum(worker.model == each.model and not worker.silent for worker in fleet.workers)
        models.append((each.model, str(each.waiting), str(each.running), str(context or "-"), str(num_workers)))
    workers = [("WORKER", "MODEL", "RUNNING", "SLOTS", "SEEN")]
    for worker in fleet.workers:
        seen = (
            f"silent for {worker.last_seen_seconds:.0f} s" if worker.silent else f"{worker.last_seen_seconds:.0f} s ago"
        )
        workers.append((worker.worker, worker.model, str(worker.running), str(worker.slots), seen))
    return f"{table(models)}\n\n{table(workers)}"
