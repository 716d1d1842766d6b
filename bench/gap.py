"""How long running requests wait for tokens while prompts arrive: largest gap between two tokens, tokens per second.

    python bench/gap.py bench/configs/llama8b --load-format dummy

Requests decode without prompts first, then a prompt is timed alone, then requests decode while a prompt arrives every
`--every` seconds. A fair share is nine tenths of the tokens that the requests would have got in the time that the
prompts leave. One engine in this process: what a server adds is not counted. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.config import STREAM_STEP_MS, EngineConfig
from outrider.core import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.start import start_engine

FAIR_SHARE = 0.9


@dataclass
class Watched:
    """Times at which requests got tokens."""

    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def note(self, request_id: str, num_tokens: int, now: float) -> None:
        if request_id in self.last:
            self.gaps.append(now - self.last[request_id])
            self.num_tokens += num_tokens
        self.last[request_id] = now


@dataclass
class Load:
    """Requests that decode, and prompts that arrive."""

    engine: Engine
    requests: int
    context: int
    prompt: int
    source: random.Random = field(default_factory=lambda: random.Random(0))
    count: int = 0

    def add(self, kind: str, length: int, max_tokens: int) -> str:
        self.count += 1
        name = f"{kind}-{self.count}"
        ids = [self.source.randrange(100, self.engine.limits.vocab_size) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add({name: self.engine.checks.check(ids, params)})
        return name

    def step(self) -> Iterator[tuple[str, int, bool]]:
        """Yields (request, tokens, whether it ended) of one step."""
        for increment in self.engine.step():
            yield increment.sample.request_id, len(increment.token_ids), increment.end is not None

    def begin(self, seconds: float) -> list[str]:
        """Requests that decode for at least so long."""
        room = self.engine.limits.max_len - self.context - 1
        names = [self.add("decoding", self.context, min(room, int(2000 * seconds))) for _ in range(self.requests)]
        waiting = set(names)
        while waiting:
            waiting -= {name for name, num_tokens, _ in self.step() if num_tokens}
        return names

    def end(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            list(self.step())

    def prompt_seconds(self) -> float:
        """Seconds of one prompt alone."""
        start = time.perf_counter()
        self.add("prompt", self.prompt, 1)
        while self.engine.has_work:
            list(self.step())
        return time.perf_counter() - start

    def watch(self, seconds: float, every: float | None) -> tuple[Watched, float, int]:
        """Decode for some seconds, with a prompt `every` so many: (what was seen, seconds, prompts that ended)."""
        names, watched = self.begin(seconds), Watched()
        start = time.perf_counter()
        due, num_ended = start, 0
        while (now := time.perf_counter()) - start < seconds:
            if every is not None and now >= due:
                self.add("prompt", self.prompt, 1)
                due += every
            for name, num_tokens, has_ended in self.step():
                num_ended += has_ended and name.startswith("prompt")
                if num_tokens and name.startswith("decoding"):
                    watched.note(name, num_tokens, time.perf_counter())
        taken = time.perf_counter() - start
        self.end(names)
        return watched, taken, num_ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--max-step-ms", type=float, default=STREAM_STEP_MS)
    args = parser.parse_args()
    longest = max(args.prompt, args.context + int(2000 * args.seconds)) + 16
    config = EngineConfig(args.model, load_format=args.load_format, max_model_len=longest,
                          max_num_seqs=2 * args.requests, max_step_ms=args.max_step_ms, enable_prefix_caching=False,
                          gpu_memory_utilization=args.gpu_memory_utilization)
    load = Load(start_engine(config), args.requests, args.context, args.prompt)
    load.watch(1.5, args.every)  # sizes are captured when they are met often
    load.prompt_seconds()
    alone = min(load.prompt_seconds() for _ in range(2))
    plain, plain_seconds, _ = load.watch(args.seconds / 2, None)
    mixed, seconds, num_prompts = load.watch(args.seconds, args.every)
    rate = plain.num_tokens / plain_seconds
    fair = FAIR_SHARE * rate * (seconds - num_prompts * alone)
    gaps = sorted(mixed.gaps)
    row = {"prompt_alone_ms": round(alone * 1e3, 1), "tok_s_without_prompts": round(rate, 1),
           "largest_gap_without_prompts_ms": round(max(plain.gaps) * 1e3, 1), "prompts": num_prompts,
           "tok_s": round(mixed.num_tokens / seconds, 1), "of_fair_share": round(mixed.num_tokens / fair, 3),
           "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1), "largest_gaps_ms":
           [round(gap * 1e3, 1) for gap in sorted(set(gaps))[-1:-9:-1]]}
    load.engine.close()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
