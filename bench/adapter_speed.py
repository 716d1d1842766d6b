"""What adapters cost on the CPU: decoding with adapters beside decoding without, interleaved, medians of the ratios.

    python bench/adapter_speed.py [--model smollm2] [--threads 2] [--repeats 5] [--new-tokens 24] [--rank 16]
                                  [--batch 4] [--drafts] [--no-keep-quantized] [--processor-time]

The sides: an engine without adapters; one with adapters loaded whose requests name none; requests that share one
adapter; and requests with an adapter each. Adapters have random factors on all linear layers of the decoder. A round
runs all sides in turn, and a side's ratio is taken within its round, so that other work on the machine disturbs all
sides alike; with one thread and `--processor-time` it disturbs less than a clock. `--drafts` turns n-gram drafts on, on
all sides. Prints bytes too: those of an adapter are read once a step, as those of the weights are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.adapters import LoRARequest
from outrider.features.adapters.target import LinearTarget
from outrider.features.adapters.targets import Targets
from outrider.models.base import Model

PROMPT = "The history of the sea is the history of those who crossed it. In the beginning there were rafts, and then"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "auto": False, "prompt_lookup_min": 1}


class Side(NamedTuple):
    llm: LLM
    adapters: list[LoRARequest | None] | None  # of each prompt


def write_adapter(folder: Path, model: Model, seed: int, rank: int) -> int:
    """An adapter with random factors, so small that texts stay sensible. Returns its bytes in float32."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for target in Targets.from_model(model).all:
        if isinstance(target, LinearTarget) and "layers." in target.name:
            shapes = {"A": (rank, target.linear.declared.in_features), "B": (target.segment.size, rank)}
            for factor, shape in shapes.items():
                name = f"base_model.model.model.{target.name}.lora_{factor}.weight"
                tensors[name] = 0.01 * torch.randn(*shape, generator=generator)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def decode_rate(side: Side, ids: list[int], batch: int, new: int, clock: Callable[[], float]) -> float:
    """Tokens per second after the first: the time of a whole run less that of a one-token run."""
    taken = []
    for count in (1, new):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = clock()
        side.llm.generate([ids] * batch, params, lora_request=side.adapters, use_tqdm=False)
        taken.append(clock() - start)
    return batch * (new - 1) / (taken[1] - taken[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--threads", type=int, default=2, help="default: 2")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of all sides (default: 5)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a generated text, at least 2 (default: 24)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: 16)")
    parser.add_argument("--batch", type=int, default=4, help="the larger batch, and its adapters (default: 4)")
    parser.add_argument("--drafts", action="store_true", help="with n-gram drafts")
    parser.add_argument("--keep-quantized", action=argparse.BooleanOptionalAction, default=True,
                        help="keep weights in the bits of the file (default), or expand them to float32")
    parser.add_argument("--processor-time", action="store_true", help="count processor time, not that of a clock")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error("--new-tokens: the first is not counted, so at least 2")
    torch.set_num_threads(args.threads)
    settings: dict[str, Any] = {
        "device": "cpu", "max_model_len": 1024, "max_num_seqs": max(8, args.batch), "enable_prefix_caching": False,
        "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 28, "keep_quantized": args.keep_quantized,
        "speculative_config": DRAFTS if args.drafts else None,
    }
    clock = time.process_time if args.processor_time else time.perf_counter
    with (tempfile.TemporaryDirectory() as root, LLM(args.model, **settings) as plain,
          LLM(args.model, enable_lora=True, max_loras=args.batch, max_lora_rank=args.rank, **settings) as llm):
        model = llm.engine.runner.device_step.model
        sizes = [write_adapter(Path(root) / str(seed), model, seed, args.rank) for seed in range(args.batch)]
        adapters = [LoRARequest(str(seed), 1 + seed, f"{root}/{seed}") for seed in range(args.batch)]
        weights = sum(slot.nbytes for slot in model.weights().values())
        print(f"{weights / 1e6:.0f} MB of weights, {sizes[0] / 1e6:.1f} MB for each adapter")
        ids = plain.get_tokenizer().encode(PROMPT)
        for batch in (1, args.batch):
            sides = {"no adapters": Side(plain, None), "loaded, none named": Side(llm, [None] * batch),
                     "one adapter": Side(llm, adapters[:1] * batch)}
            if batch > 1:
                sides["an adapter each"] = Side(llm, adapters[:batch])
            for side in sides.values():
                decode_rate(side, ids, batch, 3, clock)
            rounds = [[decode_rate(side, ids, batch, args.new_tokens, clock) for side in sides.values()]
                      for _ in range(args.repeats)]
            for place, name in enumerate(sides):
                rate = statistics.median(rates[place] for rates in rounds)
                ratio = statistics.median(rates[place] / rates[0] for rates in rounds)
                print(f"batch {batch}   {name:20} {rate:7.1f} tok/s   {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
