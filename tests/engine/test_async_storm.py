"""AsyncLLM under everything at once: wrong types, cancels, aborts, slow readers and steps that fail. Every request is
answered, none is harmed by another, and memory does not grow.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import resource
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from outrider.async_llm import AsyncLLM, RequestError
from outrider.core import ScheduledBatch
from outrider.core.params import SamplingParams
from tests.engine.harness import Ask, Rig, byte_tokenizer, greedy, prompt_of, tiny_model

SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "num_pages": 64, "max_num_batched_tokens": 64}
CURSED = 7  # no other prompt has this token, and none is allowed to choose it
NEVER = {"logit_bias": {CURSED: -100.0}}
PROMPTS = [[token for token in prompt_of(seed, 4 + 7 * seed) if token != CURSED] for seed in range(1, 7)]
ASKS = [Ask(prompt, greedy(3 + i, **NEVER) if i % 2 else SamplingParams(seed=i, max_tokens=12 - i, **NEVER))
        for i, prompt in enumerate(PROMPTS)]
BAD: list[tuple[Any, Any, dict[str, Any]]] = [
    (None, greedy(4), {}), ([], greedy(4), {}), ([5, "a"], greedy(4), {}), ([10**9], greedy(4), {}),
    (1.5, greedy(4), {}), ({"prompt": 5}, greedy(4), {}), ([5] * 200, greedy(4), {}), ([5], {"temperature": 0}, {}),
    ([5], {}, {}), ([5], 0, {}), ([5], greedy(4), {"priority": "high"}), ([5], greedy(4), {"request_id": []}),
    ([5], greedy(4), {"request_id": ""}), ({"prompt_token_ids": [5], "cache_salt": "\ud800"}, greedy(4), {}),
    ([5], SamplingParams(stop_token_ids=[10**6]), {}),
]


@functools.cache
def expected() -> list[list[int]]:
    with Rig(tiny_model("llama"), **SETTINGS) as rig:
        return [output.outputs[0].token_ids for output in rig.run(ASKS)]


SETTLING_REQUESTS = 100  # memory that is taken before so many requests is that of the first use of everything


LIMIT_SECONDS = 600  # a request without an answer by then never gets one, however slow the machine is


def resident_bytes() -> int:
    gc.collect()  # what earlier tests left in this process is not the storm's
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Storm:
    def __init__(self, rig: Rig, llm: AsyncLLM, seed: int) -> None:
        self.rig, self.llm, self.rng = rig, llm, Random(seed)
        self.counts: Counter[str] = Counter()
        self.num_tokens = 0
        self.next_fault = 20
        self.struck: set[int] = set()  # requests that a fault has met by chance: a second one could be blamed on them
        poison = rig.runner._before_step
        assert poison is not None

        def sometimes_fails(batch: ScheduledBatch) -> None:
            poison(batch)
            if batch.step >= self.next_fault and self.struck.isdisjoint(batch.request_ids):
                self.struck.update(batch.request_ids)
                self.next_fault = batch.step + self.rng.randint(60, 120)
                self.counts["failed by chance"] += 1
                raise MemoryError("by chance")

        rig.runner._before_step = sometimes_fails
        forward = rig.step.forward

        def fails_on_token(view: Any, *others: Any) -> Any:
            if bool((view.token_ids == CURSED).any()):
                self.counts["failed steps"] += 1
                raise IndexError("no such token")
            return forward(view, *others)

        rig.step.forward = fails_on_token  # type: ignore[method-assign]

    async def one(self, number: int) -> None:
        kind = self.rng.choices(["good", "slow", "bad", "cursed", "abort", "cancel", "leave"],
                                [10, 3, 5, 1, 2, 2, 2])[0]
        self.counts[kind] += 1
        await getattr(self, f"_{kind}")(number)
        self.counts["answered"] += 1

    async def _good(self, number: int, pause: float = 0) -> None:
        index = self.rng.randrange(len(ASKS))
        last = None
        async for output in self.llm.generate(list(ASKS[index].prompt), ASKS[index].params):
            last = output
            await asyncio.sleep(pause)
        assert last is not None and last.finished
        assert last.outputs[0].token_ids == expected()[index], number
        self.num_tokens += len(last.outputs[0].token_ids)

    async def _slow(self, number: int) -> None:
        await self._good(number, pause=0.02)

    async def _bad(self, number: int) -> None:
        prompt, params, options = self.rng.choice(BAD)
        with pytest.raises(ValueError):
            async for _ in self.llm.generate(prompt, params, **options):
                pass

    async def _cursed(self, number: int) -> None:
        with pytest.raises(RequestError, match="a step failed"):  # once perhaps by chance
            async for _ in self.llm.generate([number % 50 + 100, CURSED, 9], greedy(4)):
                pass

    async def _abort(self, number: int) -> None:
        index = self.rng.randrange(len(ASKS))
        stream = self.llm.generate(list(ASKS[index].prompt), ASKS[index].params, request_id=f"mine-{number}")
        output = await anext(stream)
        await self.llm.abort(f"mine-{number}")
        async for later in stream:
            output = later
        tokens = output.outputs[0].token_ids
        assert output.finished and tokens == expected()[index][: len(tokens)]

    async def _cancel(self, number: int) -> None:
        """After some turns of the event loop, which on any machine are fewer than a request takes, or some time."""
        task = asyncio.create_task(self._good(number))
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.random() * 0.02)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1

    async def _leave(self, number: int) -> None:
        stream = self.llm.generate(list(self.rng.choice(PROMPTS)), greedy(40, **NEVER))
        await anext(stream)
        await stream.aclose()


def run_storm(num_requests: int, seed: int) -> Storm:
    expected()

    async def main() -> Storm:
        with_text = byte_tokenizer()
        rig = Rig(tiny_model("llama"), tokenizer=with_text, **SETTINGS)
        async with AsyncLLM.around(rig.engine) as llm:
            storm = Storm(rig, llm, seed)
            limit = asyncio.Semaphore(24)

            async def limited(number: int) -> None:
                async with limit:
                    await asyncio.wait_for(storm.one(number), timeout=LIMIT_SECONDS)

            before, tenth = 0, num_requests // 10
            for start in range(0, num_requests, tenth):
                await asyncio.gather(*(limited(number) for number in range(start, start + tenth)))
                for kept in (rig.batches, rig.results, rig._blank):
                    kept.clear()  # what the rig writes down
                if start + tenth >= SETTLING_REQUESTS:
                    before = before or resident_bytes()
            grown = (resident_bytes() - before) / 2**20
            assert grown < 20, f"resident memory grew by {grown:.1f} MiB"
            while rig.engine.has_work:
                await asyncio.sleep(0.005)
            rig.assert_clean()
            assert not llm._owner._streams and llm.is_running
            assert storm.counts["answered"] == num_requests // tenth * tenth
            return storm

    return asyncio.run(main())


def check_storm(num_requests: int, seed: int) -> None:
    storm = run_storm(num_requests, seed)
    print(dict(storm.counts), storm.num_tokens, "tokens compared")
    for kind in ("good", "slow", "bad", "cursed", "abort", "cancelled", "leave", "failed steps", "failed by chance"):
        assert storm.counts[kind] > 0, f"never occurred: {kind}"


def test_every_request_is_answered_and_none_is_harmed() -> None:
    assert tiny_model("llama").dtype == torch.float64
    check_storm(300, 1)


@pytest.mark.long
def test_two_thousand_requests() -> None:
    check_storm(2000, 2)
