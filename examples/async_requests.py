"""Requests that run at the same time, each with its own stream: python examples/async_requests.py [MODEL]"""

import asyncio
import sys

from outrider import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, name: str, prompt: str) -> None:
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24), name):
        last = output
    print(f"{name}: {last.outputs[0].text!r}")


async def main() -> None:
    async with AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
        await asyncio.gather(ask(llm, "first", "The sea is"), ask(llm, "second", "A tide is"))


asyncio.run(main())
