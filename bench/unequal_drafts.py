"""Draft counts by request against one number for all, where every other request has most of its drafts refused.

    python bench/unequal_drafts.py bench/configs/llama8b --load-format dummy --method eagle3 \\
        --drafter bench/configs/llama8b-eagle3 --batch-sizes 1,8,64,256
    python bench/unequal_drafts.py bench/configs/nemotronh-15b-a2b --load-format dummy --method mtp --spread

Engines around one model, one after the other, each for as many requests as run in it: with the number of drafts chosen
in every step, without drafts, and with fixed numbers, as long as these get faster. Verdicts are drawn
(`synthetic_request_rates`), so weights may be random. Requests do not end while they are measured: those whose drafts
are refused would be left alone otherwise. Prints tokens per second and what the chosen numbers reach of the best fixed
one. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.benchmarks.throughput import spread_experts
from outrider.commands.flag_values import number_list
from outrider.commands.loading import Loaded, load
from outrider.commands.parser import UsageError
from outrider.config import EngineConfig
from outrider.core import SamplingParams
from outrider.core.params import RequestOutputKind


def main() -> None:
    args = read_arguments()
    loaded = load(make_config(args, max(args.batch_sizes), drafts=args.drafts), needs_text=False)
    rows = []
    for batch in args.batch_sizes:
        chosen = speed(loaded, args, batch, drafts=args.drafts, is_chosen=True)
        fixed: list[float] = []
        while len(fixed) <= args.drafts and (len(fixed) < 3 or max(fixed[-2:]) >= max(fixed)):
            fixed.append(speed(loaded, args, batch, drafts=len(fixed), is_chosen=False))
        best = max(range(len(fixed)), key=fixed.__getitem__)
        rows.append({"batch": batch, "chosen": chosen, "fixed": fixed, "best": best, "ratio": chosen / fixed[best]})
        print(f"batch {batch}: chosen {chosen:.0f} tokens/s; fixed numbers from 0 on "
              f"{', '.join(f'{one:.0f}' for one in fixed)}; {chosen / fixed[best]:.3f} of the best, {best}", flush=True)
    print(json.dumps({"model": args.model, "rates": args.rates, "rows": rows}))


class Measured(Exception):
    """Ends requests that would run on."""


def speed(loaded: Loaded, args: argparse.Namespace, batch: int, *, drafts: int, is_chosen: bool) -> float:
    """Tokens per second of an engine of its own, between a warm-up and the end of the measurement."""
    config = make_config(args, batch, drafts=drafts, is_chosen=is_chosen)
    source = random.Random(0)
    marks: list[tuple[float, int]] = []  # time and tokens, after the warm-up and at the end
    with loaded.llm(config, loaded.worker(config, prepare=spread_experts) if args.spread else None) as llm:
        vocab = llm.engine.limits.vocab_size
        prompts: list[Any] = [{"prompt_token_ids": [source.randrange(4, vocab) for _ in range(args.prompt_tokens)]}
                              for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        began = time.perf_counter()

        def before_step() -> None:
            now = time.perf_counter()
            if now - began > (args.warm_up_seconds, args.warm_up_seconds + args.seconds)[len(marks)]:
                marks.append((now, llm.engine.stats.num_generation_tokens))
                if len(marks) == 2:
                    raise Measured

        with suppress(Measured):
            for output in llm.follow(prompts, params, before_step=before_step):
                sys.exit(f"a request ended within {args.warm_up_seconds + args.seconds} s: raise --max-model-len, or "
                         f"lower --seconds ({len(output.outputs[0].token_ids)} tokens)")
    (start, before), (end, after) = marks
    return (after - before) / (end - start)


def make_config(args: argparse.Namespace, batch: int, *, drafts: int, is_chosen: bool = True) -> EngineConfig:
    speculative: dict[str, Any] | None = None
    if drafts:
        speculative = {"method": args.method, "num_speculative_tokens": drafts, "auto": is_chosen,
                       "rejection_sample_method": "synthetic",
                       "synthetic_request_rates": args.rates}
        speculative |= {} if args.drafter is None else {"model": args.drafter}
    return EngineConfig(args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
                        skip_tokenizer_init=True, max_model_len=args.max_model_len, max_num_seqs=batch,
                        num_pages=args.num_pages, enable_prefix_caching=False, speculative_config=speculative)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--drafter", help="the folder of the drafter, if it is not the target's own")
    parser.add_argument("--drafts", type=int, default=5, help="most drafts of a request in a step (default: 5)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.9, 0.2], metavar="P",
                        help="acceptance of requests, in turn (default: 0.9 0.2)")
    parser.add_argument("--batch-sizes", type=number_list, default=(1, 8, 64, 256), metavar="N,N",
                        help="default: 1,8,64,256")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=2.0, help="that are measured (default: 2)")
    parser.add_argument("--warm-up-seconds", type=float, default=1.5, help="before them (default: 1.5)")
    parser.add_argument("--num-pages", type=int, help="of the cache (default: what fits)")
    parser.add_argument("--spread", action="store_true", help="draw experts, since random routers choose the same few")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (UsageError, ValueError) as error:
        sys.exit(f"unequal_drafts: {error}")
