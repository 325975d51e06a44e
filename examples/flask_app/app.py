"""The same chat on Flask, with the client for code that has no event loop. README.md says how to run it.

A stream occupies a thread of the web server as long as it is read, and one that waits for the next event.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from flask import Flask, Response, jsonify, request, send_file
from pydantic import BaseModel, Field, ValidationError

from inferq.producer import (
    Event,
    InferqError,
    InvalidRequest,
    NoWorker,
    QueueFull,
    RedisUnavailable,
    State,
    SyncEventStream,
    SyncInferenceClient,
    UnknownModel,
    UnknownRequest,
)

PAGE: Final = Path(__file__).resolve().parents[1] / "chat_page" / "index.html"
#: Proxies close a connection on which nothing is said. And only who writes notices that a browser has gone.
PING_SECONDS: Final = 15.0
#: So long a browser waits before it reconnects.
RETRY_MS: Final = 1000
NO_BUFFERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
STATUS_OF: Final[dict[type[InferqError], int]] = {
    InvalidRequest: 422,
    UnknownRequest: 404,
    QueueFull: 429,
    UnknownModel: 503,
    RedisUnavailable: 503,
}
Found = SimpleQueue[tuple[str, Event | NoWorker] | InferqError | None]

app = Flask(__name__)


class Chat(BaseModel):
    message: str = Field(min_length=1, max_length=20_000)
    max_tokens: int = Field(default=256, ge=1, le=4096)


@cache
def client() -> SyncInferenceClient:
    """One a process, which all threads share. $INFERQ_REDIS_URL and $INFERQ_MODEL say where and what."""
    made = SyncInferenceClient.from_url()
    atexit.register(made.close)
    return made


@app.post("/chats")
def begin() -> tuple[Response, int]:
    """Accept a chat; its answer is at /chats/{id}/events. It ends when nobody has read it for half a minute."""
    chat = Chat.model_validate(request.get_json())
    request_id = client().submit(
        messages=[{"role": "user", "content": chat.message}],
        sampling={"max_tokens": chat.max_tokens},
        cancel_on_disconnect=True,
    )
    return jsonify(id=request_id), 202


@app.get("/chats/<request_id>/events")
def events(request_id: str) -> Response:
    """The answer as server-sent events, from the position on that the browser has come to.

    A browser that has it all, and lost the connection just then, gets a 204: that alone ends its reconnecting.
    """
    position = request.headers.get("Last-Event-ID", "0")
    stream = client().stream(request_id, position)
    status = client().status(request_id)
    if status.state is State.UNKNOWN:
        raise UnknownRequest(f"nothing is known under the id {request_id}")
    if status.is_over and position != "0":
        with client().stream(request_id, position) as rest:
            if next(rest, None) is None:
                return Response(status=204)
    return Response(sse(stream), mimetype="text/event-stream", headers=NO_BUFFERS)


@app.post("/chats/<request_id>/cancel")
def cancel(request_id: str) -> Response:
    """Stop it, wherever it runs. What was generated so far stays readable."""
    return jsonify(outcome=client().cancel(request_id))


@app.get("/healthz")
def healthz() -> Response:
    """Whether this instance can reach the queue, and who works there; 503 if it cannot."""
    fleet = client().fleet()
    return jsonify(
        workers=sum(not each.silent for each in fleet.workers),
        backlog={model.model: model.waiting for model in fleet.models},
    )


@app.get("/")
def page() -> Response:
    return send_file(PAGE)


@app.errorhandler(InferqError)
def refuse(error: InferqError) -> tuple[Response, int, dict[str, str]]:
    status = next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(math.ceil(error.retry_after_seconds))} if isinstance(error, QueueFull) else {}
    return jsonify(error=str(error)), status, headers


@app.errorhandler(ValidationError)
def refuse_chat(error: ValidationError) -> tuple[Response, int]:
    return jsonify(error=str(error)), 422


def sse(stream: SyncEventStream) -> Iterator[str]:
    """Events as text, and a comment whenever nothing came for a while. The server closes it when a write fails."""
    found: Found = SimpleQueue()
    with stream:  # which also ends the thread
        Thread(target=read, args=(stream, found), daemon=True).start()
        yield f"retry: {RETRY_MS}\n\n"
        while True:
            try:
                item = found.get(timeout=PING_SECONDS)
            except Empty:
                yield ": ping\n\n"
                continue
            if item is None:
                return
            if isinstance(item, InferqError):  # too late for a status; a browser that reconnected would meet it again
                yield f"event: lost\ndata: {json.dumps({'error': str(item)})}\n\n"
                return
            position, event = item
            yield f"id: {position}\nevent: {event.type}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"


def read(stream: SyncEventStream, found: Found) -> None:
    """Puts each event there with the position right after it; at the end None, or the error."""
    try:
        for event in stream:
            found.put((stream.position, event))
        found.put(None)
    except InferqError as error:
        found.put(error)
