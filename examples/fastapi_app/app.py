"""A chat on FastAPI: enqueue, stream by server-sent events, stop. README.md says how to run it.

The `id:` of each event is the reader's position. A browser that reconnects sends it back as `Last-Event-ID`, to this
instance or to another one, and gets exactly what it lacks: nothing of a chat lives in this process.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from inferq.producer import (
    EventStream,
    InferenceClient,
    InferqError,
    InvalidRequest,
    QueueFull,
    RedisUnavailable,
    State,
    StreamEvent,
    UnknownModel,
    UnknownRequest,
)

PAGE: Final = Path(__file__).resolve().parents[1] / "chat_page" / "index.html"
#: So long a browser waits before it reconnects.
RETRY_MS: Final = 1000
#: A comment is due when nothing came for so long: proxies close a connection on which nothing is said.
PING_SECONDS: Final = 15.0
NO_BUFFERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
STATUS_OF: Final[dict[type[InferqError], int]] = {
    InvalidRequest: 422,
    UnknownRequest: 404,
    QueueFull: 429,
    UnknownModel: 503,
    RedisUnavailable: 503,
}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client a process; all streams share a connection. $INFERQ_REDIS_URL and $INFERQ_MODEL say where and what."""
    async with InferenceClient.from_url() as client:
        app.state.client = client
        yield


def client_of(request: Request) -> InferenceClient:
    client: InferenceClient = request.app.state.client
    return client


Client = Annotated[InferenceClient, Depends(client_of)]


async def open_stream(
    request_id: str, client: Client, last_event_id: Annotated[str, Header()] = "0"
) -> AsyncIterator[EventStream]:
    """The stream behind what the browser has. Errors have a status of their own as long as nothing was sent.

    A browser that has it all, and lost the connection just then, gets a 204: that alone ends its reconnecting.
    """
    async with client.stream(request_id, last_event_id) as stream:
        status = await client.status(request_id)
        if status.state is State.UNKNOWN:
            raise UnknownRequest(f"nothing is known under the id {request_id}")
        if status.is_over and last_event_id != "0":
            async with client.stream(request_id, last_event_id) as rest:
                if await anext(rest, None) is None:
                    raise HTTPException(204)
        yield stream


Stream = Annotated[EventStream, Depends(open_stream)]
app = FastAPI(title="inferq chat", lifespan=lifespan)


class Chat(BaseModel):
    message: str = Field(min_length=1, max_length=20_000)
    max_tokens: int = Field(default=256, ge=1, le=4096)


@app.post("/chats", status_code=202)
async def begin(chat: Chat, client: Client) -> dict[str, str]:
    """Accept a chat; its answer is at /chats/{id}/events. It ends when nobody has read it for half a minute."""
    request_id = await client.submit(
        messages=[{"role": "user", "content": chat.message}],
        sampling={"max_tokens": chat.max_tokens},
        cancel_on_disconnect=True,
    )
    return {"id": request_id}


@app.get("/chats/{request_id}/events")
async def events(stream: Stream) -> StreamingResponse:
    """The answer as server-sent events, from the position on that the browser has come to."""
    return StreamingResponse(sse(stream), media_type="text/event-stream", headers=NO_BUFFERS)


@app.post("/chats/{request_id}/cancel")
async def cancel(request_id: str, client: Client) -> dict[str, str]:
    """Stop it, wherever it runs. What was generated so far stays readable."""
    return {"outcome": await client.cancel(request_id)}


@app.get("/healthz")
async def healthz(client: Client) -> dict[str, Any]:
    """Whether this instance can reach the queue, and who works there; 503 if it cannot."""
    fleet = await client.fleet()
    return {
        "workers": sum(not each.silent for each in fleet.workers),
        "backlog": {model.model: model.waiting for model in fleet.models},
    }


@app.get("/", response_class=FileResponse)
async def page() -> Path:
    return PAGE


async def sse(stream: EventStream) -> AsyncIterator[str]:
    """Events as text, and a comment whenever nothing came for a while. Cancelled when the browser has gone.

    FastAPI's own `EventSourceResponse` for generators would do this too, but where a browser leaves while more is there
    than it has taken, its tasks close each other's streams and the log gets a traceback (seen with 0.165).
    """
    yield f"retry: {RETRY_MS}\n\n"
    coming: asyncio.Future[StreamEvent | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(stream, None))
            await asyncio.wait([coming], timeout=PING_SECONDS)
            if not coming.done():
                yield ": ping\n\n"
                continue
            event, coming = coming.result(), None
            if event is None:
                return
            yield f"id: {stream.position}\nevent: {event.type}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"
    except InferqError as error:  # too late for a status; a browser that reconnected would meet it again
        yield f"event: lost\ndata: {json.dumps({'error': str(error)})}\n\n"
    finally:
        if coming is not None:
            coming.cancel()


@app.exception_handler(InferqError)
async def refuse(_: Request, error: InferqError) -> JSONResponse:
    status = next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(math.ceil(error.retry_after_seconds))} if isinstance(error, QueueFull) else {}
    return JSONResponse({"error": str(error)}, status, headers)
