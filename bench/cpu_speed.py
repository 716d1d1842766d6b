"""Outrider beside transformers and llama.cpp on the CPU: SmolLM2-135M, the same weights, interleaved runs, medians.

    python bench/cpu_speed.py [--threads 2] [--repeats 5] [--llama FOLDER] [--model FILE] [--without SIDE ...]
                              [--new-tokens 64] [--processor-time]

Prints single-stream decoding, a batch of 8 and prompt processing, and what an Outrider step costs by its token rows.
The sides: Outrider with the weights in the file's own bits (the default) and dequantised to float32, which are
equally close to exact sums; with token rows rounded to 8 bits (`activation_bits=8`), as llama.cpp does; transformers
in float32 (needs `pip install transformers`); and llama.cpp, if a folder with its library is named (see
llama_library.py). The last line is JSON. Threads of llama.cpp wait for each other by turning in a loop: measure it on a
machine without other work, or with one thread and `--processor-time`, which other work disturbs less than a clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from outrider import LLM, SamplingParams
from outrider.models.sources import resolve
from outrider.runner.graphs.costs import measure_costs

OURS = {"outrider": {}, "8-bit rows": {"activation_bits": 8}, "float32 weights": {"keep_quantized": False}}
TRANSFORMERS, LLAMA = "transformers", "llama.cpp"
PROMPT = "The history of the sea is the history of those who crossed it. In the beginning there were rafts, and then"
Run = Callable[[list[list[int]], int], object]  # generates a number of new tokens after prompts


def our_llm(model: str, settings: dict[str, Any]) -> LLM:
    return LLM(model, max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False, max_num_batched_tokens=512,
               kv_cache_memory_bytes=1 << 29, speculative_config=None, **settings)


def hf_model(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    source = resolve(name)
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    missing, extra = model.load_state_dict(dict(source.tensors()), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not extra, (missing, extra)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def hf_generate(model: Any, ids: list[list[int]], new: int) -> None:
    with torch.inference_mode():
        model.generate(torch.tensor(ids), attention_mask=torch.ones(len(ids), len(ids[0]), dtype=torch.long),
                       max_new_tokens=new, do_sample=False, pad_token_id=0)


def llama_generate(folder: str, model: str, threads: int) -> Run:
    from llama_library import LlamaLibrary

    path = str(resolve(model).path)
    one, eight = (LlamaLibrary(folder, path, threads=threads, sequences=n, length=1024) for n in (1, 8))
    print(f"{LLAMA}: {one.system}")
    return lambda ids, new: (one if len(ids) == 1 else eight).generate(ids, new)


def our_generate(llm: LLM, ids: list[list[int]], new: int) -> None:
    llm.generate(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False))


class Meter(NamedTuple):
    clock: Callable[[], float]
    new_tokens: int

    def seconds(self, run: Run, ids: list[list[int]], new: int) -> float:
        start = self.clock()
        run(ids, new)
        return self.clock() - start

    def decode_rate(self, run: Run, ids: list[list[int]]) -> float:
        """Tokens per second after the first: the time of a whole run less that of a one-token run."""
        first = self.seconds(run, ids, 1)
        return len(ids) * (self.new_tokens - 1) / (self.seconds(run, ids, self.new_tokens) - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of every side (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="of each case; the median counts (default: 5)")
    parser.add_argument("--model", default="smollm2", help="a GGUF file of a Llama model (default: smollm2)")
    parser.add_argument("--llama", metavar="FOLDER", help="the folder of llama.cpp's library")
    parser.add_argument("--without", nargs="*", default=[], choices=[*OURS, TRANSFORMERS], help="sides to leave out")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a generated text, at least 2 (default: 64)")
    parser.add_argument("--processor-time", action="store_true", help="count processor time, not that of a clock")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error("--new-tokens: the first is not counted, so at least 2")
    if TRANSFORMERS not in args.without and find_spec(TRANSFORMERS) is None:
        sys.exit("transformers is not here: `pip install transformers`, or --without transformers")
    torch.set_num_threads(args.threads)
    engines = {side: our_llm(args.model, settings) for side, settings in OURS.items() if side not in args.without}
    sides: dict[str, Run] = {side: partial(our_generate, llm) for side, llm in engines.items()}
    if TRANSFORMERS not in args.without:
        sides[TRANSFORMERS] = partial(hf_generate, hf_model(args.model))
    if args.llama:
        sides[LLAMA] = llama_generate(args.llama, args.model, args.threads)
    ids = next(iter(engines.values())).get_tokenizer().encode(PROMPT)[:32]
    long = (ids * 32)[:512]
    meter = Meter(time.process_time if args.processor_time else time.perf_counter, args.new_tokens)
    cases: dict[str, Callable[[Run], float]] = {
        "single stream, tok/s": lambda run: meter.decode_rate(run, [ids]),
        "batch 8, tok/s": lambda run: meter.decode_rate(run, [ids] * 8),
        "prompt of 512, tok/s": lambda run: 512 / meter.seconds(run, [long], 1),
    }
    report: dict[str, Any] = {"threads": args.threads, "repeats": args.repeats, "new_tokens": args.new_tokens,
                              "clock": "processor time" if args.processor_time else "wall clock"}
    for run in sides.values():
        run([ids], 4)
    for name, case in cases.items():
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.repeats):
            for side, run in sides.items():
                rates[side].append(case(run))
                print(f"{name:22}   {side} {rates[side][-1]:.1f}", file=sys.stderr, flush=True)
        report[name] = {side: statistics.median(found) for side, found in rates.items()}
        print(f"{name:22}", *(f"{side} {rate:.1f}" for side, rate in report[name].items()), sep="   ", flush=True)
        for peer in sides.keys() - OURS.keys():
            ratios = (f"{side} {report[name][side] / report[name][peer]:.2f}" for side in engines)
            print(f"{'':22}", f"against {peer}:", *ratios, sep="   ", flush=True)
    for side, llm in engines.items():
        costs = measure_costs(llm.engine.runner.device_step, llm.engine.limits, sizes=(1, 2, 4, 5, 8, 16))
        report[f"step_ms, {side}"] = {n: s * 1e3 for n, s in zip(costs.tokens, costs.seconds, strict=True)}
        print(f"a step of n token rows, ms ({side}):", *(f"{n}: {s * 1e3:.1f}" for n, s in
                                                          zip(costs.tokens, costs.seconds, strict=True)))
        llm.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
