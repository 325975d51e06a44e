"""The engine by itself, without Redis: two prompts at once, their answers streamed side by side.

    python examples/engine_only.py [MODEL]

MODEL is `demo` (the default), a folder or a Hugging Face id.
"""

from __future__ import annotations

import asyncio
import sys

from inferq.engine import AsyncInferenceEngine, EngineConfig, SamplingParams

QUESTIONS = ("What is a queue, in one sentence?", "Name three colours.")


async def ask(engine: AsyncInferenceEngine, name: str, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    async for delta in engine.generate(messages=messages, sampling=SamplingParams(max_tokens=48, temperature=0.0)):
        print(f"{name}: {delta.text!r}" + (f"  [{delta.finish_reason}]" if delta.finish_reason else ""))


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    async with AsyncInferenceEngine(EngineConfig(model=model, max_model_len=512)) as engine:
        await asyncio.gather(*(ask(engine, f"answer {n}", question) for n, question in enumerate(QUESTIONS, 1)))


if __name__ == "__main__":
    asyncio.run(main())
