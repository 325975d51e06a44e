"""What a web app does with inferq, here four times at once: submit, stream the answer, cancel one part-way.

`make demo` runs it beside a worker of its own. By itself: `python examples/demo_producer.py redis://localhost:6379`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass

from demo_screen import Answer, Screen

from inferq.producer import Delta, Failed, Finished, InferenceClient, InferqError, Started


@dataclass(frozen=True)
class Chat:
    request_id: str
    question: str
    max_tokens: int = 48
    ignore_eos: bool = False
    cancel_after_tokens: int | None = None


CHATS = (
    Chat("chat-1", "What is the capital of France?"),
    Chat("chat-2", "Give me three tips for a good night's sleep."),
    Chat("chat-3", "Tell me a long story about a lighthouse.", 400, ignore_eos=True, cancel_after_tokens=32),
    Chat("chat-4", "Why is rain good for a garden?"),
)


async def submit(client: InferenceClient, chat: Chat) -> str:
    return await client.submit(
        messages=[{"role": "user", "content": chat.question}],
        sampling={"max_tokens": chat.max_tokens, "ignore_eos": chat.ignore_eos, "temperature": 0.0},
        request_id=chat.request_id,
    )


async def follow(client: InferenceClient, chat: Chat, answer: Answer, screen: Screen) -> None:
    """Read one stream to its end. Any other process could read it as well, at the same time or later."""
    submitted = time.monotonic()
    first = last = submitted
    async for event in client.stream(chat.request_id):
        match event:
            case Started():
                answer.state, answer.queue_ms = "running", event.queue_ms
            case Delta():
                last = time.monotonic()
                if not answer.tokens:
                    first, answer.first_token_ms = last, (last - submitted) * 1000
                before = answer.tokens
                answer.text += event.text
                answer.tokens += len(event.token_ids)
                if before < (chat.cancel_after_tokens or 0) <= answer.tokens:
                    await client.cancel(chat.request_id)
            case Finished():
                answer.state = event.finish_reasons[0]
            case Failed():
                await client.result(chat.request_id)  # raises the error that the event stands for
        screen.update(answer)
    if last > first:
        answer.tokens_per_second = (answer.tokens - 1) / (last - first)


async def run(url: str) -> None:
    answers = [Answer(chat.request_id, chat.question) for chat in CHATS]
    screen = Screen(answers)
    async with InferenceClient.from_url(url, model="demo") as client:
        await asyncio.gather(*(submit(client, chat) for chat in CHATS))
        with screen.open():
            async with asyncio.TaskGroup() as group:
                for chat, answer in zip(CHATS, answers, strict=True):
                    group.create_task(follow(client, chat, answer, screen))
        screen.table()


async def run_until_told_to_stop(url: str) -> None:
    """SIGTERM cancels the work, so that the terminal is left in order."""
    task = asyncio.ensure_future(run(url))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379"
    status = 0
    try:
        asyncio.run(run_until_told_to_stop(url))
    except* (asyncio.CancelledError, KeyboardInterrupt):
        status = 130
    except* InferqError as group:
        status = 1
        for error in group.exceptions:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
