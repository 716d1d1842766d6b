"""Outrider beside transformers on the CPU: SmolLM2-135M in float32, the same weights, interleaved runs, medians.

    python bench/cpu_speed.py [--threads 2] [--repeats 5]

Prints single-stream decoding, a batch of 8, prompt processing, and what an Outrider step costs by its token rows: with
the weights in the file's own bits (the default) and dequantised to float32, which give the same tokens.
The last line is JSON. Needs the test extra (transformers).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.models.sources import resolve
from outrider.runner.graphs.costs import measure_costs

NEW_TOKENS = 64
DENSE = "float32 weights"
PROMPT = "The history of the sea is the history of those who crossed it. In the beginning there were rafts, and then"


def our_llm(keep_quantized: bool) -> LLM:
    return LLM("smollm2", max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False, max_num_batched_tokens=512,
               keep_quantized=keep_quantized)


def hf_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    source = resolve("smollm2")
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    missing, extra = model.load_state_dict(dict(source.tensors()), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not extra, (missing, extra)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def hf_generate(model: Any, ids: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(torch.tensor(ids), attention_mask=torch.ones(len(ids), len(ids[0]), dtype=torch.long),
                       max_new_tokens=new, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start


def our_generate(llm: LLM, ids: list[list[int]], new: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(ids, params)
    return time.perf_counter() - start


def decode_rate(run: Any, ids: list[list[int]]) -> float:
    """Tokens per second after the first: the time of a whole run less that of a one-token run."""
    first = run(ids, 1)
    return len(ids) * (NEW_TOKENS - 1) / (run(ids, NEW_TOKENS) - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm, dense = (our_llm(keep_quantized) for keep_quantized in (True, False))
    model = hf_model()
    ids = llm.get_tokenizer().encode(PROMPT)[:32]
    long = (ids * 16)[:512]
    sides = {"outrider": lambda i, n: our_generate(llm, i, n), "transformers": lambda i, n: hf_generate(model, i, n),
             DENSE: lambda i, n: our_generate(dense, i, n)}
    cases = {
        "single stream, tok/s": lambda run: decode_rate(run, [ids]),
        "batch 8, tok/s": lambda run: decode_rate(run, [ids] * 8),
        "prompt of 512, tok/s": lambda run: 512 / run([long], 1),
    }
    report: dict[str, Any] = {"threads": args.threads, "repeats": args.repeats}
    for run in sides.values():
        run([ids], 4)
    for name, case in cases.items():
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.repeats):
            for side, run in sides.items():
                rates[side].append(case(run))
        ours, theirs, ours_dense = (statistics.median(rates[side]) for side in sides)
        report[name] = {"outrider": ours, "transformers": theirs, "ratio": ours / theirs,
                        DENSE: ours_dense, f"{DENSE} ratio": ours_dense / theirs}
        print(f"{name:24s} outrider {ours:7.1f}   transformers {theirs:7.1f}   ratio {ours / theirs:.2f}   "
              f"{DENSE} {ours_dense:7.1f}   ratio {ours_dense / theirs:.2f}")
    for key, engine in (("step_ms", llm.engine), (f"step_ms, {DENSE}", dense.engine)):
        costs = measure_costs(engine.runner.device_step, engine.limits, sizes=(1, 2, 4, 5, 8, 16))
        report[key] = {n: s * 1e3 for n, s in zip(costs.tokens, costs.seconds, strict=True)}
        print(f"a step of n token rows ({key}):", ", ".join(f"{n}: {s:.1f}" for n, s in report[key].items()))
    llm.close()
    dense.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
