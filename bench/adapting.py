"""How fast an engine serves while its EAGLE-3 head learns from the traffic, against an engine whose head does not.

    python bench/adapting.py bench/configs/llama8b --load-format dummy --drafter bench/configs/llama8b-eagle3 \\
        --rates 0.7,0.6,0.5 --batch-sizes 1,8,64
    python bench/adapting.py tests/assets/target --drafter tests/assets/eagle3 --device cpu --batch-sizes 1,4

Two engines around one model take turns; the trainer is kept busy for as long as its engine serves, and paused while the
other one does. Prints tokens per second of both and their ratio for each batch size, the memory of the record and of
the trainer, and which share of the time the trainer worked. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.commands.loading import load
from outrider.config import EngineConfig
from outrider.core import SamplingParams, ScheduledBatch
from outrider.features.learning import learner as learning
from outrider.features.learning.learner import DrafterLearner
from outrider.llm import LLM

MIB = 1 << 20


def main() -> None:
    args = read_arguments()
    began = time.perf_counter()
    config = make_config(args)
    loaded = load(config, needs_text=False)
    learning.MOST_EPOCHS = 1 << 40  # the trainer never runs out of work
    plain_worker = loaded.worker(replace(config, adapt_drafter=False))
    worker = loaded.worker(config)
    (learner,) = worker.device_step.drafting._observers
    assert isinstance(learner, DrafterLearner)
    plain_llm = loaded.llm(replace(config, adapt_drafter=False), plain_worker)
    with plain_llm as plain, loaded.llm(config, worker) as adapting:
        weights = sum(weight.nbytes for weight in learner._candidate.weights.values())
        print(f"ready after {time.perf_counter() - began:.0f} s; record {learner.ring.num_bytes / MIB:.0f} MiB, "
              f"weights, gradients and moments {4 * weights / MIB:.0f} MiB", flush=True)
        learner.pause()
        for llm in (plain, adapting):
            generate(llm, max(args.batch_sizes), 24, args, seed=0)  # texts to learn from, and warm engines
            generate(llm, max(16, max(args.batch_sizes)), 8, args, seed=1)
        rows = []
        for batch in args.batch_sizes:
            speeds: dict[bool, list[float]] = {False: [], True: []}
            before, seconds = learner.report, 0.0
            for index in range(args.rounds):
                for is_adapting in (False, True) if index % 2 else (True, False):
                    if is_adapting:
                        learner.resume()
                    else:
                        # Its engine is not idle: what the trainer owes of rest stays due.
                        learner.begin(ScheduledBatch(0, [], [], [], [], [], [], []))
                    start = time.perf_counter()
                    speeds[is_adapting].append(generate(adapting if is_adapting else plain, batch, args.max_tokens,
                                                        args, seed=2 + index))
                    seconds += (time.perf_counter() - start) * is_adapting
                    if not is_adapting:
                        learner.end_step()
                    learner.pause()
                if time.perf_counter() - began > args.seconds:
                    break
            ratios = [own / other for own, other in zip(speeds[True], speeds[False], strict=True)]
            row = {"batch": batch, "plain": statistics.median(speeds[False]),
                   "adapting": statistics.median(speeds[True]), "ratio": statistics.median(ratios),
                   "least": min(ratios), "steps": learner.report.num_steps - before.num_steps,
                   "worked": (learner.report.work_seconds - before.work_seconds) / seconds}
            rows.append(row)
            print(f"batch {batch}: {row['plain']:.1f} tokens/s, adapting {row['adapting']:.1f}, ratio "
                  f"{row['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds), "
                  f"{row['steps']} training steps, {row['worked']:.1%} of the time", flush=True)
        print(f"{learner.report}", flush=True)
        print(json.dumps({"share": args.share, "rows": rows, "record_bytes": learner.ring.num_bytes,
                          "trainer_bytes": 4 * weights, "swaps": learner.report.num_swaps,
                          "errors": learner.report.num_errors}))


def generate(llm: LLM, count: int, max_tokens: int, args: argparse.Namespace, *, seed: int) -> float:
    """Tokens per second of so many requests at once, prompts included."""
    source = random.Random(seed)
    vocab = llm.engine.limits.vocab_size
    prompts = [[source.randrange(4, vocab) for _ in range(args.prompt_tokens)] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began)


def make_config(args: argparse.Namespace) -> EngineConfig:
    speculative: dict[str, Any] = {"method": "eagle3", "model": args.drafter, "num_speculative_tokens": args.drafts}
    if args.rates:
        speculative["synthetic_rates"] = [float(rate) for rate in args.rates.split(",")]
    length = args.prompt_tokens + args.max_tokens + 8
    return EngineConfig(args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
                        skip_tokenizer_init=True, max_model_len=length, max_num_seqs=max(args.batch_sizes),
                        num_pages=2 + -(-length // 16) * 4 * max(args.batch_sizes), enable_prefix_caching=False,
                        speculative_config=speculative, adapt_drafter=True, adapt_share=args.share,
                        adapt_memory_bytes=args.memory_mib * MIB)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--rates", help="accept drafts at these rates, as 0.7,0.6,0.5")
    parser.add_argument("--batch-sizes", default="1,4")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.03)
    parser.add_argument("--memory-mib", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round of a batch size after this time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    return args


if __name__ == "__main__":
    main()
