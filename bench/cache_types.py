"""How long decoding takes behind long contexts, with keys and values in the model's dtype and in fp8.

    python bench/cache_types.py bench/configs/llama8b --load-format dummy --layers 16
    ... --drafter bench/configs/llama8b-eagle3 --rates 0.57,0.53    with 3 drafts, accepted at these rates

One engine after the other. Prompts are computed once and found in the prefix cache afterwards. The time of a token is
that of 64 tokens more, a 64th of it: the median of three. Last line: JSON with seconds a token.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider import LLM, SamplingParams

FEW, MORE, ROUNDS = 8, 64, 3
DRAFTS = 3


def seconds_a_token(llm: LLM, requests: int, context: int) -> float:
    source, highest = random.Random(0), min(30000, llm.engine.limits.vocab_size - 1)
    prompts = [{"prompt_token_ids": [source.randint(1, highest) for _ in range(context)]} for _ in range(requests)]

    def run(num_tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False),
                     use_tqdm=False)
        return time.perf_counter() - began

    run(2)
    return median((-run(FEW) + run(FEW + MORE)) / MORE for _ in range(ROUNDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--layers", type=int, help="of the model, if fewer")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=2031, help="tokens of a prompt")
    parser.add_argument("--drafter", help="folder of an EAGLE-3 head")
    parser.add_argument("--rates", default="0.57,0.57", help="at which its drafts are accepted, with each type")
    args = parser.parse_args()
    overrides = {} if args.layers is None else {"num_hidden_layers": args.layers}
    seconds: dict[str, float] = {}
    for name, rate in zip(("auto", "fp8"), map(float, args.rates.split(",")), strict=True):
        drafts = None if args.drafter is None else {
            "method": "eagle3", "model": args.drafter, "num_speculative_tokens": DRAFTS,
            "rejection_sample_method": "synthetic", "synthetic_rates": [rate] * DRAFTS}
        with LLM(args.model, load_format=args.load_format, skip_tokenizer_init=True, max_num_seqs=args.requests,
                 max_model_len=args.context + FEW + MORE + 1, hf_overrides=overrides, kv_cache_dtype=name,
                 speculative_config=drafts) as llm:
            seconds[name] = seconds_a_token(llm, args.requests, args.context)
        print(f"kv_cache_dtype={name!r}: {1e3 * seconds[name]:.3f} ms a token of {args.requests} requests", flush=True)
    print(f"fp8 is {seconds['auto'] / seconds['fp8']:.3f} times as fast")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
