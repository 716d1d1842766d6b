"""Outrider and vLLM on one card with the same prompts, default settings and random weights: one line of JSON a case.

    python bench/beside.py bench/configs/llama8b --engine outrider --cases 7x1024x192,80x300x300,mix
    python bench/beside.py bench/configs/llama8b --engine vllm --cases 7x1024x192,80x300x300,mix

The second runs in vLLM's environment. Cases: BxIxO (requests, tokens in, tokens out); sBxCxIxO (C tokens in common, I
of their own); nNxIxO (N samples of one prompt); tCxTxIxO (C chats of T turns, each adds I tokens and answers O); mix
(200 requests, lognormal lengths). Prompts are random ids, new in every round. The better round counts, and the first
one is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

GREEDY = {"temperature": 0.0}
Prompt = list[int]


class Bench:
    def __init__(self, llm: Any, sampling: Any) -> None:
        self._llm, self._sampling = llm, sampling

    def run(self, case: str, seed: int) -> tuple[float, int]:
        """(seconds, output tokens) of one round."""
        rng = random.Random(f"{case}{seed}")
        if case.startswith("t"):
            return self._chats(rng, *numbers(case[1:]))
        prompts, outs, n, params = shape_of(case, rng)
        start = time.perf_counter()
        answers = self._generate(prompts, outs, n, params)
        return time.perf_counter() - start, sum(len(answer) for answer in answers)

    def _chats(self, rng: random.Random, chats: int, turns: int, added: int, out: int) -> tuple[float, int]:
        histories: list[Prompt] = [[] for _ in range(chats)]
        start = time.perf_counter()
        for _ in range(turns):
            histories = [history + ids(rng, added) for history in histories]
            answers = self._generate(histories, [out] * chats, 1, GREEDY)
            histories = [history + answer for history, answer in zip(histories, answers, strict=True)]
        return time.perf_counter() - start, chats * turns * out

    def _generate(self, prompts: list[Prompt], outs: list[int], n: int, params: dict[str, Any]) -> list[Prompt]:
        sampling = [self._sampling(max_tokens=out, ignore_eos=True, detokenize=False, n=n, **params) for out in outs]
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("x")]


def ids(rng: random.Random, count: int) -> Prompt:
    return [rng.randint(100, 30000) for _ in range(count)]


def shape_of(case: str, rng: random.Random) -> tuple[list[Prompt], list[int], int, dict[str, Any]]:
    """(prompts, tokens out of each, samples of each, sampling parameters)"""
    if case == "mix":
        prompts = [ids(rng, min(3500, max(8, int(rng.lognormvariate(5.5, 1.0))))) for _ in range(200)]
        return prompts, [min(500, max(4, int(rng.lognormvariate(5.0, 0.8)))) for _ in prompts], 1, GREEDY
    if case.startswith("s"):
        count, common, own, out = numbers(case[1:])
        head = ids(rng, common)
        return [head + ids(rng, own) for _ in range(count)], [out] * count, 1, GREEDY
    if case.startswith("n"):
        samples, length, out = numbers(case[1:])
        return [ids(rng, length)], [out], samples, {"temperature": 1.0}
    count, length, out = numbers(case)
    return [ids(rng, length) for _ in range(count)], [out] * count, 1, GREEDY


def make_llm(args: argparse.Namespace) -> tuple[Any, Any]:
    settings = {"load_format": "dummy", "max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs,
                "gpu_memory_utilization": 0.85, **json.loads(args.extra)}
    if args.speculative_config:
        settings["speculative_config"] = json.loads(args.speculative_config)
    if args.engine == "vllm":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM, SamplingParams

        settings["skip_tokenizer_init"] = True
    else:
        from outrider import LLM, SamplingParams

        settings |= {"dtype": "bfloat16", "device": "cuda"}
    return LLM(args.model, **settings), SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--engine", choices=["outrider", "vllm"], default="outrider")
    parser.add_argument("--cases", required=True, help="separated by commas")
    parser.add_argument("--speculative-config", default="", help="JSON")
    parser.add_argument("--extra", default="{}", help="more settings of LLM, as JSON")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    start = time.perf_counter()
    llm, sampling = make_llm(args)
    about = {"engine": args.engine, "model": os.path.basename(args.model.rstrip("/")),
             "drafts": bool(args.speculative_config)}
    print(json.dumps({**about, "start_s": round(time.perf_counter() - start, 1)}), flush=True)
    bench = Bench(llm, sampling)
    bench.run("1x64x16", 0)
    for case in args.cases.split(","):
        try:
            rounds = [bench.run(case, seed) for seed in range(args.rounds)]
        except Exception as error:  # the other cases are measured all the same
            print(json.dumps({**about, "case": case, "error": repr(error)[:200]}), flush=True)
            continue
        speeds = [tokens / seconds for seconds, tokens in rounds]
        found = {"case": case, "tok_s": round(max(speeds), 1), "first": round(speeds[0], 1)}
        print(json.dumps({**about, **found}), flush=True)


if __name__ == "__main__":
    main()
