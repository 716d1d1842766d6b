"""What sampling parameters cost a whole engine: each alone, all together, and one such request among greedy ones.

    python bench/parameters.py bench/configs/qwen06b --load-format dummy [--batches 1,32,200] [--only greedy,top_p]
        [--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}']

One engine serves all cases, so that its start is paid once. A ratio is to the first case of the same batch. With drafts
`mean_run` says how many tokens a step gave: parameters change the text, and with it what a drafter finds, so `per_run`
compares the speed of steps alone. With synthetic acceptance (`"rejection_sample_method": "synthetic"`) the text has no
say in it. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider import LLM, SamplingParams  # noqa: E402

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
ALL = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "min_tokens": 8, "logprobs": 5, **PENALTIES}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.0, "top_p": 0.9}, "min_p": {"temperature": 1.0, "min_p": 0.02}, "penalties": PENALTIES,
    "logprobs": {"logprobs": 5}, "logit_bias": {"logit_bias": {5: 2.0}}, "min_tokens": {"min_tokens": 16},
    "all": ALL, "one top_p": {"temperature": 1.0, "top_p": 0.9}, "one all": ALL,
}  # fmt: skip


def params_of(name: str, batch: int, length: int) -> list[SamplingParams]:
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, "detokenize": False}
    asked, greedy = SamplingParams(**(base | CASES[name])), SamplingParams(**base)
    return [asked, *[greedy] * (batch - 1)] if name.startswith("one") else [asked] * batch


def measure(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], rounds: int) -> dict[str, float]:
    """The best round."""
    best = {"tok_s": 0.0}
    for _ in range(rounds):
        before, start = llm.engine.stats.copy(), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        speed = sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
        mean_run = llm.engine.stats.since(before).mean_run_length
        if speed > best["tok_s"]:
            best = {"tok_s": round(speed, 1), "mean_run": round(mean_run, 3), "per_run": round(speed / mean_run, 1)}
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", default="1,32,200")
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt, and of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--speculative-config", type=json.loads)
    options = parser.parse_args()
    batches, source = [int(batch) for batch in options.batches.split(",")], random.Random(0)
    results = []
    with LLM(options.model, load_format=options.load_format, max_model_len=4096, max_num_seqs=256,
             enable_prefix_caching=False, speculative_config=options.speculative_config) as llm:
        highest = min(30000, llm.engine.limits.vocab_size - 1)
        for batch in batches:
            prompts = [[source.randint(1, highest) for _ in range(options.tokens)] for _ in range(batch)]
            first: dict[str, float] | None = None
            for name in options.only.split(","):
                row = measure(llm, prompts, params_of(name, batch, options.tokens), options.rounds)
                first = first or row
                row |= {"ratio": round(row["tok_s"] / first["tok_s"], 3),
                        "ratio_per_run": round(row["per_run"] / first["per_run"], 3)}
                results.append({"batch": batch, "case": name, **row})
                print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"model": options.model, "speculative_config": options.speculative_config, "results": results}))


if __name__ == "__main__":
    main()
