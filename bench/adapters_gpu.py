"""What adapters cost on a GPU: speed with adapters beside an engine without them, and beside what their bytes allow.

    python bench/adapters_gpu.py bench/configs/llama8b [--batches 8,64] [--rounds 2] [--out-tokens 256]

Random weights, prompts of 128 random tokens. Adapters have random factors on all linear layers; those of one rank share
a file and are loaded as different ones. Best of the rounds. A line has the speed, its ratio to the engine without
adapters, and the ceiling that the adapters' bytes set: a step takes at least as long as without them and as long as
these bytes take at the bandwidth of the memory.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from adapter_speed import write_adapter

from outrider import LLM, SamplingParams
from outrider.adapters import LoRARequest

PROMPT_TOKENS = 128
CASES = {16: (1, 8, 64), 64: (1, 8)}  # rank: how many adapters the requests of a batch have


def adapters_of(llm: LLM, root: Path, rank: int, count: int) -> tuple[list[LoRARequest], int]:
    """(adapters that share one file, the bytes of one on the device)"""
    file = root / f"r{rank}"
    model = llm.engine.runner.device_step.model
    num_bytes = write_adapter(file, model, rank, rank) // 4 * model.dtype.itemsize
    requests = []
    for index in range(count):
        folder = root / f"r{rank}-{index}"
        folder.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).symlink_to(file / name)
        requests.append(LoRARequest(folder.name, 1000 * rank + index + 1, str(folder)))
    return requests, num_bytes


def tokens_per_second(llm: LLM, batch: int, out_tokens: int, rounds: int,
                      adapters: list[LoRARequest | None] | None) -> float:
    params = SamplingParams(temperature=0, max_tokens=out_tokens, ignore_eos=True, detokenize=False)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    draw, best = random.Random(batch), 0.0
    for index in range(rounds + 1):
        prompts = [[draw.randrange(100, 30000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        start = time.perf_counter()
        llm.generate(prompts, params if index else short, lora_request=adapters, use_tqdm=False)  # the first loads
        best = max(best, batch * out_tokens / (time.perf_counter() - start) if index else 0)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a config")
    parser.add_argument("--batches", default="8,64", help="default: 8,64")
    parser.add_argument("--rounds", type=int, default=2, help="default: 2")
    parser.add_argument("--out-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the memory, in TB/s (default: 4.8, an H200's)")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    settings: dict[str, Any] = {"load_format": "dummy", "device": args.device, "max_model_len": 1024,
                                "max_num_seqs": max(batches), "enable_prefix_caching": False}
    if args.device == "cuda":
        settings["dtype"] = "bfloat16"
    base = {}
    with LLM(args.model, **settings) as llm:
        for batch in batches:
            base[batch] = tokens_per_second(llm, batch, args.out_tokens, args.rounds, None)
            print(json.dumps({"batch": batch, "adapters": None, "tok_s": round(base[batch], 1)}), flush=True)
    for rank, counts in CASES.items():
        with (tempfile.TemporaryDirectory() as root,
              LLM(args.model, enable_lora=True, max_loras=max(counts), max_lora_rank=rank, **settings) as llm):
            requests, num_bytes = adapters_of(llm, Path(root), rank, max(counts))
            for batch in batches:
                for count in (0, *counts):
                    if count > batch:
                        continue
                    chosen = [requests[index % count] if count else None for index in range(batch)]
                    speed = tokens_per_second(llm, batch, args.out_tokens, args.rounds, chosen)
                    step = batch / base[batch]
                    ceiling = step / (step + count * num_bytes / (args.bandwidth * 1e12))
                    print(json.dumps({
                        "batch": batch, "adapters": count, "rank": rank, "tok_s": round(speed, 1),
                        "of_base": round(speed / base[batch], 3), "ceiling": round(ceiling, 3),
                        "of_ceiling": round(speed / base[batch] / ceiling, 3)}), flush=True)


if __name__ == "__main__":
    main()
