"""The cost of sampling parameters in a whole engine: each alone, all together, and one such request among greedy ones.

    python bench/parameters.py bench/configs/qwen06b --load-format dummy [--batches 1,32,200] [--only greedy,top_p]
        [--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}']
    python bench/parameters.py smollm2 --batches 1,8 --prompt 8 --tokens 24 --rounds 7     # on a CPU
    OMP_NUM_THREADS=1 python bench/parameters.py smollm2 --batches 1,8 --prompt 8 --tokens 24 --processor-time

One engine serves all cases, so that its start is paid once. In every round each case is measured right after the first
one, and a ratio is the median of the rounds'. On a busy machine --processor-time counts the seconds that this process
computes; that is for one thread, since others wait in loops. With drafts `mean_run` says how many tokens a step gave:
parameters change the text, and with it what a drafter finds, so `per_run` compares the speed of steps alone. With
synthetic acceptance (`"rejection_sample_method": "synthetic"`) the text has no say in it. Prints a table with a column
for each batch size, then the figures as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider import LLM, SamplingParams

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
LISTS = {"logit_bias": {5: 2.0, 700: -1.0}, "bad_words_token_ids": ((7,), (5, 6), (1, 2, 3))}
ALL = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "min_tokens": 8, "logprobs": 5, "seed": 1,
       **PENALTIES, **LISTS}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.0, "top_p": 0.9}, "min_p": {"temperature": 1.0, "min_p": 0.02}, "penalties": PENALTIES,
    **{name: {name: value} for name, value in PENALTIES.items()}, "logprobs": {"logprobs": 5},
    **{name: {name: value} for name, value in LISTS.items()}, "min_tokens": {"min_tokens": 8},
    "seed": {"temperature": 1.0, "seed": 1}, "all": ALL, "one top_p": {"temperature": 1.0, "top_p": 0.9},
    "one all": ALL,
}


Clock = Callable[[], float]


@dataclass(frozen=True)
class Speed:
    """Tokens per second, and tokens that a step gave to a request."""

    tok_s: float
    mean_run: float

    @property
    def per_run(self) -> float:
        return self.tok_s / self.mean_run


def params_of(name: str, batch: int, length: int) -> list[SamplingParams]:
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, "detokenize": False}
    asked, greedy = SamplingParams(**(base | CASES[name])), SamplingParams(**base)
    return [asked, *[greedy] * (batch - 1)] if name.startswith("one") else [asked] * batch


def measure(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], clock: Clock) -> Speed:
    before, start = llm.engine.stats.copy(), clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = clock() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Speed(num_tokens / seconds, llm.engine.stats.since(before).mean_run_length)


def compare(llm: LLM, prompts: list[list[int]], names: list[str], length: int, rounds: int,
            clock: Clock) -> list[dict[str, Any]]:
    """All cases at one batch size, each beside the first. The round before the first is not counted."""
    batch, pairs = len(prompts), {name: list[tuple[Speed, Speed]]() for name in names}
    for number in range(rounds + 1):
        for name in names:
            pair = [measure(llm, prompts, params_of(each, batch, length), clock) for each in (names[0], name)]
            if number > 0:
                pairs[name].append((pair[0], pair[1]))
    return [summary(batch, name, own) for name, own in pairs.items()]


def summary(batch: int, name: str, pairs: list[tuple[Speed, Speed]]) -> dict[str, Any]:
    ratios = [own.tok_s / first.tok_s for first, own in pairs]
    per_run = statistics.median(own.per_run / first.per_run for first, own in pairs)
    row = {"batch": batch, "case": name, "tok_s": round(statistics.median(own.tok_s for _, own in pairs), 1),
           "mean_run": round(statistics.median(own.mean_run for _, own in pairs), 3),
           "ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3),
           "most": round(max(ratios), 3), "ratio_per_run": round(per_run, 3)}
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def table(results: list[dict[str, Any]], batches: list[int]) -> str:
    """Markdown: a line for each case, its ratio for each batch size."""
    by = {(row["case"], row["batch"]): row for row in results}
    lines = ["| case | " + " | ".join(f"batch {batch}" for batch in batches) + " |", "|---" * (1 + len(batches)) + "|"]
    for name in dict.fromkeys(row["case"] for row in results):
        cells = [f"{by[name, b]['ratio']:.2f} ({by[name, b]['tok_s']:.0f} tok/s)" for b in batches]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", default="1,32,200")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, and of a prompt")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt, if another number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--speculative-config", type=json.loads)
    options = parser.parse_args()
    batches, source = [int(batch) for batch in options.batches.split(",")], random.Random(0)
    clock: Clock = time.process_time if options.processor_time else time.perf_counter
    results = []
    with LLM(options.model, load_format=options.load_format, max_model_len=4096, max_num_seqs=256,
             enable_prefix_caching=False, speculative_config=options.speculative_config) as llm:
        highest = min(30000, llm.engine.limits.vocab_size - 1)
        for batch in batches:
            size = options.prompt or options.tokens
            prompts = [[source.randint(1, highest) for _ in range(size)] for _ in range(batch)]
            results += compare(llm, prompts, options.only.split(","), options.tokens, options.rounds, clock)
    print(table(results, batches))
    print(json.dumps({"model": options.model, "speculative_config": options.speculative_config, "results": results}))


if __name__ == "__main__":
    main()
