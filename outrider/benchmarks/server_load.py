"""`outrider bench serve`: sends load to any server with OpenAI's API, in a closed loop or at an arrival rate, and
measures its times.

Requests are streamed. Times are measured in the client: to the first event with text (TTFT), between events (ITL), per
output token after the first (TPOT), and of the whole request (E2EL). Names follow vLLM's benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.commands.http_stream import Address, HttpError, model_names, stream_events
from outrider.commands.output_files import check_result_file
from outrider.commands.parser import UsageError
from outrider.core.status_line import say

PERCENTILES = (50, 90, 99)
FIRST_ID = 10  # least token id of random prompts
WORDS = ("sea", "wind", "stone", "light", "road", "house", "river", "night", "tree", "song")


@dataclass
class Measured:
    """The measured times of one request, in seconds."""

    began: float
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    error: str | None = None

    @property
    def times(self) -> dict[str, float]:
        """Latencies of a request that succeeded, by name, in milliseconds."""
        assert self.first is not None
        times = {"ttft": self.first - self.began, "e2el": self.last - self.began}
        if self.num_tokens > 1:
            times["tpot"] = (self.last - self.first) / (self.num_tokens - 1)
        return {name: seconds * 1000 for name, seconds in times.items()}


def run(args: argparse.Namespace) -> int:
    goals = _goals(args.goodput or [])
    check_result_file(args.save_result)
    if args.request_rate is not None and not 0 < args.request_rate < math.inf:
        raise UsageError(f"--request-rate must be a number above 0, got {args.request_rate}")
    if args.vocab_size <= FIRST_ID:
        raise UsageError(f"--vocab-size must be above {FIRST_ID}, because lower token ids are often special and are "
                         f"never drawn; got {args.vocab_size}")
    address = Address.parse(args.base_url)
    began = time.perf_counter()
    try:
        measured = asyncio.run(_drive(args, address))
    except (HttpError, OSError, LookupError, asyncio.IncompleteReadError) as error:  # asked for its models
        raise ValueError(f"no server answers at {args.base_url} ({error}): start one with `outrider serve`, or give "
                         "its address by --base-url") from None
    result = summary(measured, time.perf_counter() - began, goals)
    result |= {"base_url": args.base_url, "max_concurrency": args.max_concurrency, "request_rate": args.request_rate}
    _print(result)
    failed = [one.error for one in measured if one.error is not None]
    if failed:
        say(f"{len(failed)} requests failed, the first with: {failed[0]}")
    text = json.dumps(result)
    if args.save_result:
        Path(args.save_result).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


async def _drive(args: argparse.Namespace, address: Address) -> list[Measured]:
    """Start requests at their arrival times, but run at most max_concurrency of them at once."""
    model = args.model or (await model_names(address, args.api_key))[0]
    chosen = random.Random(args.seed)
    bodies = [_body(args, model, chosen) for _ in range(args.num_prompts)]
    room = asyncio.Semaphore(args.max_concurrency or args.num_prompts)
    path = "/v1/chat/completions" if args.chat else "/v1/completions"

    async def one(body: dict[str, Any]) -> Measured:
        async with room:
            return await measure(address, path, body, args.api_key)

    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(one(body)))
        if args.request_rate is not None:
            await asyncio.sleep(chosen.expovariate(args.request_rate))
    return await asyncio.gather(*tasks)


def _body(args: argparse.Namespace, model: str, chosen: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": args.output_len, "temperature": args.temperature,
                            "stream": True, "stream_options": {"include_usage": True}}
    if not args.stop_at_eos:
        body["ignore_eos"] = True
    if args.chat:
        words = " ".join(chosen.choice(WORDS) for _ in range(args.input_len))
        return body | {"messages": [{"role": "user", "content": words}]}
    return body | {"prompt": [chosen.randrange(FIRST_ID, args.vocab_size) for _ in range(args.input_len)]}


async def measure(address: Address, path: str, body: dict[str, Any], key: str | None) -> Measured:
    measured = Measured(time.perf_counter())
    try:
        async for event in stream_events(address, path, body, key):
            if "error" in event:
                raise HttpError(str(event["error"]))
            _take(measured, event, time.perf_counter())
    except (HttpError, OSError, ValueError, asyncio.IncompleteReadError) as error:
        measured.error = f"{type(error).__name__}: {error}"
    if measured.first is None and measured.error is None:
        measured.error = "no text came"
    return measured


def _take(measured: Measured, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices", []):
        delta = choice.get("delta", choice)
        if delta.get("text") or delta.get("content") or delta.get("reasoning"):
            if measured.first is None:
                measured.first = now
            else:
                measured.gaps.append(now - measured.last)
            measured.last = now
    if usage := event.get("usage"):
        measured.num_prompt_tokens, measured.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    drafts = (event.get("metrics") or {}).get("speculative_decoding") or {}
    measured.num_drafts = drafts.get("num_spec_steps", measured.num_drafts)
    measured.num_accepted = drafts.get("num_accepted_draft_tokens", measured.num_accepted)


def summary(measured: Sequence[Measured], seconds: float, goals: dict[str, float]) -> dict[str, Any]:
    done = [one for one in measured if one.error is None]
    num_tokens, steps = sum(one.num_tokens for one in done), sum(one.num_drafts for one in done)
    result: dict[str, Any] = {
        "completed": len(done), "failed": len(measured) - len(done), "duration": round(seconds, 3),
        "total_input_tokens": sum(one.num_prompt_tokens for one in done), "total_output_tokens": num_tokens,
        "request_throughput": round(len(done) / seconds, 3), "output_throughput": round(num_tokens / seconds, 2),
        "mean_acceptance_length": round(1 + sum(one.num_accepted for one in done) / steps, 3) if steps else None,
    }
    times: dict[str, list[float]] = {name: [one.times[name] for one in done if name in one.times]
                                     for name in ("ttft", "tpot", "e2el")}
    times["itl"] = [gap * 1000 for one in done for gap in one.gaps]
    for name, values in times.items():
        if values:
            result[f"mean_{name}_ms"] = round(sum(values) / len(values), 3)
            result |= {f"p{p}_{name}_ms": round(percentile(values, p), 3) for p in PERCENTILES}
    if goals:
        good = [one for one in done if all(one.times.get(name, 0.0) <= limit for name, limit in goals.items())]
        result["request_goodput"] = round(len(good) / seconds, 3)
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, interpolated between the two nearest ones."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _goals(words: Sequence[str]) -> dict[str, float]:
    goals = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise UsageError(f"--goodput: {word!r} must be ttft:MS, tpot:MS or e2el:MS")
    return goals


def _print(result: dict[str, Any]) -> None:
    print("============ Serving Benchmark Result ============")
    for name, value in result.items():
        if value is not None:
            print(f"{name.replace('_', ' '):<28}{value}")
