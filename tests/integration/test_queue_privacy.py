"""What must not be where: users' text in a log, model libraries in the worker's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import redis.asyncio
from support.processes import scripted
from support.queue import KEYS, MODEL, answer_to, arq_payload, put_plain, scripted_worker
from support.streams import until_delta, until_ended

from inferq.producer import InferenceClient, RequestFailed

CANARY = "canary-5e1c"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["debug", "info"])
async def test_no_prompt_and_no_completion_is_logged(redis_url: str, client: redis.asyncio.Redis, level: str) -> None:
    """Whatever becomes of the request: finished, refused, undecodable, the death of its engine, handed back."""
    flags = ("--log-level", level, "--max-model-len", "256")
    engine = ["--step-ms", "5", "--refuse-text", "refuse", "--exit-on-text", "poison"]
    completions = []
    async with (
        scripted_worker(redis_url, *flags, engine=engine) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        for prompt in (CANARY, f"{CANARY} refuse", f"{CANARY} {'x' * 300}"):
            request_id = await producer.submit(prompt, sampling={"max_tokens": 30, "stop": [CANARY]})
            await until_ended(client, KEYS, request_id)
            completions.append(answer_to(prompt, 30))
        chat = [{"role": "user", "content": CANARY}]
        assert (await producer.result(await producer.submit(messages=chat, sampling={"max_tokens": 3}))).text
        for payload in (
            f"{CANARY}".encode(),
            arq_payload(CANARY),
            arq_payload(args=[{"prompt": CANARY, CANARY: CANARY}]),
        ):
            await until_ended(client, KEYS, await put_plain(client, payload))
        poison = await producer.submit(f"{CANARY} poison", sampling={"max_tokens": 3})
        with pytest.raises(RequestFailed):
            await producer.result(poison)
        letters = await client.xrange(KEYS.dead)
        assert CANARY not in repr(letters)
        moved = await producer.submit(f"{CANARY} move", sampling={"max_tokens": 200, "ignore_eos": True})
        await until_delta(client, KEYS, moved)
        worker.send(signal.SIGTERM)
        worker.send(signal.SIGTERM)
        assert await worker.wait(20) == 0
        await producer.cancel(moved)
        assert poison in worker.log, "the request's id is what a log is searched by"
        assert CANARY not in worker.log
        for completion in completions:
            assert completion[:8] not in worker.log


WHOLE_WORKER = """
import asyncio, json, os, signal, sys, threading
from inferq.producer import InferenceClient
from inferq.worker.main import run

url, model = sys.argv[1:]
said = {}

async def talk():
    async with InferenceClient.from_url(url, model=model) as client:
        request_id = await client.submit(messages=[{"role": "user", "content": "hi"}], sampling={"max_tokens": 5})
        said["tokens"] = len((await client.result(request_id, timeout=60)).token_ids)

def producer():
    try:
        asyncio.run(talk())
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=producer).start()
said["exit"] = run(["--redis-url", url, "--served-model-name", model])
heavy = ("torch", "transformers", "numpy", "safetensors", "accelerate", "gguf", "triton")
said["loaded"] = [name for name in heavy if name in sys.modules]
print(json.dumps(said))
"""


def test_a_whole_worker_loads_no_model_library(redis_url: str) -> None:
    """One chat request through a worker in this very process: tokenizer, template, detokenizer and all."""
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_WORKER, redis_url, MODEL],
        env={**os.environ, **scripted()},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert json.loads(done.stdout) == {"tokens": 5, "exit": 0, "loaded": []}, done.stderr
