"""Prompts that begin alike: output tokens per second of a whole `generate`, and what was computed of the beginning.

    python bench/common_prefix.py bench/configs/llama8b --load-format dummy --cases 64x4000+200x64 n16x2000x128

A case is REQUESTSxCOMMON+OWNxOUT (requests with a common beginning and tokens of their own) or nSAMPLESxPROMPTxOUT
(samples of one prompt). Prompts are new in every round; the first round is given beside the best one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from typing import Any

from outrider import LLM, SamplingParams


def prompts_of(case: str, round_index: int) -> tuple[list[list[int]], SamplingParams]:
    source = random.Random(f"{case} {round_index}")

    def tokens(count: str) -> list[int]:
        return [source.randrange(100, 30000) for _ in range(int(count))]

    common = re.fullmatch(r"(\d+)x(\d+)\+(\d+)x(\d+)", case)
    if common:
        head = tokens(common[2])
        return [head + tokens(common[3]) for _ in range(int(common[1]))], params_of(int(common[4]), temperature=0)
    samples = re.fullmatch(r"n(\d+)x(\d+)x(\d+)", case)
    if samples is None:
        raise SystemExit(f"{case}: a case is REQUESTSxCOMMON+OWNxOUT or nSAMPLESxPROMPTxOUT")
    return [tokens(samples[2])], params_of(int(samples[3]), temperature=0.8, n=int(samples[1]))


def params_of(num_out: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_out, ignore_eos=True, detokenize=False, **others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cases", nargs="+", default=["64x4000+200x64", "n16x2000x128"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int, default=16384)
    args = parser.parse_args()
    with LLM(args.model, load_format=args.load_format, max_model_len=args.max_model_len,
             speculative_config=args.speculative_config) as llm:
        llm.generate([{"prompt_token_ids": [100] * 64}], params_of(16, temperature=0), use_tqdm=False)
        for case in args.cases:
            speeds: list[float] = []
            for index in range(args.rounds):
                prompts, params = prompts_of(case, index)
                began = time.perf_counter()
                outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
                num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
                speeds.append(num_tokens / (time.perf_counter() - began))
            computed = [len(prompt) - (output.num_cached_tokens or 0)
                        for prompt, output in zip(prompts, outputs, strict=True)]
            print(json.dumps({"case": case, "tok_s": round(max(speeds), 1), "first_tok_s": round(speeds[0], 1),
                              "computed": computed[:10]}), flush=True)


if __name__ == "__main__":
    main()
