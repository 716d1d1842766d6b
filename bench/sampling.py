"""Times the sampler's kernels on a card: each sampling parameter, for 1, 32 and 200 logit rows, beside the byte floor.

    python bench/sampling.py [--seconds 240] [--out results.jsonl] [--kernels]

Every case is one whole `sample` in a captured graph, over logits that are not in the cache; the floor is one read of
the logits. `plain` is the draw at a temperature, `one top_p` a single such request among greedy ones. Logits are drawn
flat, as those of random weights are, or peaked, as those of trained models are. With --kernels also the time of every
kernel, where all parameters are asked for at once.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_harness import Bench, graph_us, sets

from outrider.core import Admission, Limits
from outrider.core.checked_request import CheckedRequest
from outrider.core.params import SamplingParams
from outrider.sample import (
    History,
    LogitRows,
    Sampled,
    SamplingRows,
    StepExtras,
    StepNeeds,
    sample,
)

VOCABULARIES = {"qwen06b": 151936, "llama8b": 128256}
ROWS = (1, 32, 200)
LENGTH = 256
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
BIAS = {token: 1.0 for token in range(0, 3000, 10)}
WORDS = tuple((token, token + 1, token + 2) for token in range(50))
ALL: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, **PENALTIES, "logit_bias": BIAS, "min_tokens": 10,
                       "stop_token_ids": [3, 4], "bad_words_token_ids": WORDS, "logprobs": 5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "plain": {}, "top_k 50": {"top_k": 50}, "top_k 1000": {"top_k": 1000},
    "top_p 0.9": {"top_p": 0.9}, "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9}, "min_p": {"min_p": 0.02},
    "penalties": PENALTIES, "logit_bias 300": {"logit_bias": BIAS},
    "logit_bias 5000": {"logit_bias": {token: 1.0 for token in range(5000)}}, "bad_words 50":
    {"bad_words_token_ids": WORDS}, "allowed": {"allowed_token_ids": list(range(0, 9000, 3))},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": [3]}, "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20}, "all": ALL, "all, greedy": ALL | {"temperature": 0.0},
}
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Sampler:
    """A batch of requests with one logit row each."""

    logit_rows: LogitRows
    rows: SamplingRows
    history: History
    needs: StepNeeds

    @classmethod
    def of(cls, params: list[SamplingParams], vocab: int) -> Sampler:
        num = len(params)
        limits = Limits(max_requests=num, max_batched_tokens=num, max_len=LENGTH, max_drafts=0, vocab_size=vocab,
                        max_list_ints=1 << 22)
        rows, tokens = SamplingRows(limits, CUDA), torch.randint(0, 5000, (num + 1, LENGTH))
        rows.admit([
            Admission(i + 1, CheckedRequest(tuple(tokens[i + 1, :128].tolist()), replace(one, seed=i)), computed=0,
                      max_len=LENGTH, output_ids=tokens[i + 1, 128:].tolist())
            for i, one in enumerate(params)
        ])
        assert not rows.lists.unplaced
        request = torch.arange(num, device=CUDA)
        known = torch.full((num + 1,), LENGTH - 1, device=CUDA)
        history = History(tokens.to(CUDA), known, torch.zeros(num + 1, 0, dtype=torch.int64, device=CUDA), LENGTH)
        at = LogitRows(request, request + 1, torch.zeros_like(request), known[1:].clone())
        return cls(at, rows, history, StepNeeds.from_params(params, [1] * num))

    def sample(self, logits: torch.Tensor) -> Sampled:
        return sample(logits, self.logit_rows, self.rows, self.history, self.needs, StepExtras())


def make_logits(count: int, num: int, vocab: int, is_peaked: bool) -> list[torch.Tensor]:
    every = [torch.randn(num, vocab, device=CUDA).mul_(2.5 if is_peaked else 0.64) for _ in range(count)]
    for logits in every if is_peaked else ():
        logits[:, 100:110] += 14
    return every


def params_of(name: str, num: int) -> list[SamplingParams]:
    if name == "one top_p":
        return [SamplingParams(top_p=0.9), *[SamplingParams(temperature=0.0)] * (num - 1)]
    return [SamplingParams(max_tokens=None, **CASES[name])] * num


def report_kernels(bench: Bench, case: str, sampler: Sampler, every: list[torch.Tensor], size: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for logits in every:
            sampler.sample(logits)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            bench.report(event.key[:18], case, event.self_device_time_total / event.count, size)


def run(bench: Bench, model: str, num: int, is_peaked: bool, kernels: bool) -> None:
    vocab = VOCABULARIES[model]
    size, case = 4 * num * vocab, f"{model} rows={num} {'peaked' if is_peaked else 'flat'}"
    every = make_logits(min(sets(size), 8), num, vocab, is_peaked)
    for name in [*CASES, "one top_p"]:
        if not bench.has_time:
            return
        sampler = Sampler.of(params_of(name, num), vocab)
        us = graph_us(lambda i, sampler=sampler: sampler.sample(every[i]), len(every))  # type: ignore[misc]
        bench.report(name, case, us, size)
        if kernels and name == "all":
            report_kernels(bench, case, sampler, every, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.seconds, options.out)
    for model in VOCABULARIES:
        for num in ROWS:
            for is_peaked in (False, True):
                run(bench, model, num, is_peaked, options.kernels)
    print(bench.table())


if __name__ == "__main__":
    main()
