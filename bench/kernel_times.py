"""Checks and times every Triton kernel in bf16 at real shapes: `python bench/kernel_times.py --only linear`.

Each kernel is compared with plain torch, then timed in a captured graph over inputs larger than the cache, against
the time its bytes need at the card's read bandwidth. Prints one JSON line per case and a table. Sweeps the tile
configurations that the tables in the kernels are filled from. Knows nothing of models beyond their shapes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_chain import bench_chains
from kernel_harness import (
    COLD_BYTES,
    MODELS,
    Bench,
    Model,
    compile_all,
    graph_us,
    make_cache,
    must_be_close,
    randn,
    relative_error,
    sets,
)

from outrider.kernels import gpu as kernels
from outrider.kernels import reference
from outrider.kernels.gpu.attention.decode import decode_attention
from outrider.kernels.gpu.attention.prefill import PrefillConfig, prefill_config
from outrider.kernels.gpu.attention.splits import DecodeConfig, decode_config
from outrider.kernels.gpu.linear.matvec import matvec, matvec_config
from outrider.kernels.gpu.linear.thin import ThinConfig, is_small, thin_config, thin_linear

VECTOR_CONFIGS = [
    ThinConfig(*c)
    for c in ((2, 1024, 4, 1), (4, 1024, 4, 1), (8, 1024, 4, 1), (16, 1024, 4, 1), (4, 512, 2, 1), (8, 2048, 8, 1),
              (2, 2048, 8, 1), (1, 2048, 8, 1), (8, 512, 4, 1))
]
TILE_CONFIGS = [
    ThinConfig(*c)
    for c in ((8, 256, 4, 8), (16, 256, 4, 4), (16, 512, 4, 4), (32, 128, 4, 5), (32, 256, 4, 4), (64, 128, 4, 4),
              (64, 256, 8, 3))
]
DECODE_CONFIGS = [
    DecodeConfig(*c) for c in ((32, 64, 4, 5), (64, 64, 4, 5), (64, 64, 4, 3), (32, 64, 2, 5), (128, 64, 8, 4))
]
PREFILL_CONFIGS = [PrefillConfig(*c) for c in ((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3))]


# Linear layers


def bench_linear(bench: Bench, model: str, name: str, n: int, k: int, num_rows: int) -> None:
    count = sets(2 * n * k)
    weights = [randn(n, k) * 0.02 for _ in range(count)]
    x = randn(num_rows, k)
    wanted = x.float() @ weights[0].float().T
    vector, tile = matvec_config(n, k, is_small=is_small(weights[0])), thin_config(n, 132)
    linear, default = (matvec, vector) if num_rows == 1 else (thin_linear, tile)
    configs = [default] + [c for c in (VECTOR_CONFIGS if num_rows == 1 else TILE_CONFIGS) if c != default]
    results: dict[ThinConfig, float] = {}
    error = 0.0
    for config in configs:
        if results and not bench.has_time:
            break
        try:
            error = max(error, relative_error(linear(x, weights[0], config=config), wanted))
            results[config] = graph_us(lambda i, c=config: linear(x, weights[i], config=c), count)
        except Exception as problem:
            print(f"# {model} {name} {config}: {type(problem).__name__}: {str(problem)[:160]}", flush=True)
    library = graph_us(lambda i: F.linear(x, weights[i]), count)
    best = min(results, key=lambda c: results[c])
    must_be_close(f"{linear.__name__} {model} {name}", error)
    num_bytes = 2 * (n * k + num_rows * (n + k))
    bench.report(linear.__name__, f"{model} {name} {n}x{k} rows={num_rows}", results[best], num_bytes, error,
                 best=[best.block_n, best.block_k, best.num_warps, best.num_stages],
                 default_us=round(results.get(default, math.nan), 2), torch_us=round(library, 2))


def linear_compiles(n: int, k: int) -> list[Callable[[], Any]]:
    x, weight = randn(4, k), randn(n, k)
    default = matvec_config(n, k, is_small=is_small(weight))
    calls = [lambda c=config: matvec(x[:1], weight, config=c) for config in {default, *VECTOR_CONFIGS}]
    calls += [lambda c=config: thin_linear(x, weight, config=c) for config in {thin_config(n, 132), *TILE_CONFIGS}]
    return calls


def bench_linears(bench: Bench) -> None:
    for model, shape in MODELS.items():
        if bench.has_time:
            compile_all([call for n, k in shape.linears().values() for call in linear_compiles(n, k)])
        for name, (n, k) in shape.linears().items():
            for num_rows in (1, 4, 16):
                bench_linear(bench, model, name, n, k, num_rows)


# Attention


def bench_decode(bench: Bench, requests: int, length: int, queries: int) -> None:
    model = MODELS["llama8b"]
    num_bytes = 4 * requests * length * model.kv_heads * model.head_dim
    layers = max(2, min(32, math.ceil(COLD_BYTES / num_bytes)))
    cache = make_cache(requests, length, queries, model, layers)
    q = randn(requests * queries, model.heads, model.head_dim)
    scale = model.head_dim**-0.5
    wanted = reference.paged_attention(q.float(), *(t.float() for t in cache.args(0)[:2]), *cache.args(0)[2:], scale)
    bound = cache.page_table.shape[1] * 16
    splits = [None, 1, 8, 16] if requests == 1 else [None, 1, 4] if requests == 8 else [None]
    results: dict[str, float] = {}
    error = 0.0
    default = decode_config(model.head_dim)
    for config in [default] + [c for c in DECODE_CONFIGS if c != default]:
        for num_splits in splits:
            if results and not bench.has_time:
                continue
            options = {"scale": scale, "max_query": queries, "max_length": bound, "num_splits": num_splits,
                       "config": config}
            error = max(error, relative_error(decode_attention(q, *cache.args(0), **options), wanted))
            label = f"n{config.block_n}w{config.num_warps}s{config.num_stages}/{num_splits or 'auto'}"
            results[label] = graph_us(lambda i, o=options: decode_attention(q, *cache.args(i), **o), layers)
    best = min(results, key=lambda c: results[c])
    must_be_close("decode_attention", error)
    ranked = dict(sorted(((k, round(v, 2)) for k, v in results.items()), key=lambda kv: kv[1])[:4])
    bench.report("decode_attention", f"{requests} x {length}, {queries} queries", results[best], num_bytes, error,
                 best=best, default_us=round(next(iter(results.values())), 2), ranked=ranked)


def bench_prefill(bench: Bench, requests: int, length: int) -> None:
    model = MODELS["llama8b"]
    cache = make_cache(requests, length, length, model, 2)
    q = randn(requests * length, model.heads, model.head_dim)
    scale = model.head_dim**-0.5
    k, v = (cache.pool[:, 0, i][cache.page_table.long()].reshape(requests, length, model.kv_heads, model.head_dim)
            for i in (0, 1))
    dense = [t.transpose(1, 2) for t in (q.view(requests, length, model.heads, model.head_dim), k, v)]

    def sdpa(_: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(*dense, is_causal=True, scale=scale, enable_gqa=True)

    wanted = sdpa(0).transpose(1, 2).reshape(q.shape)
    results: dict[str, float] = {}
    error = 0.0
    default = prefill_config(model.head_dim)
    for config in [default] + [c for c in PREFILL_CONFIGS if c != default]:
        if results and not bench.has_time:
            break
        tiles = kernels.query_tiles([length] * requests, model.heads, model.kv_heads, model.head_dim, q.device,
                                    config=config)
        run = lambda i, t=tiles: kernels.prefill_attention(q, *cache.args(i), t, scale=scale)  # noqa: E731
        error = max(error, relative_error(run(0), wanted))
        results[f"m{config.block_m}n{config.block_n}w{config.num_warps}s{config.num_stages}"] = graph_us(run, 2)
    must_be_close("prefill_attention", error)
    best = min(results, key=lambda c: results[c])
    flops = 2 * requests * length * length * model.heads * model.head_dim
    bench.report("prefill_attention", f"{requests} x {length}", results[best], 4 * q.numel(), error, best=best,
                 tflops=round(flops / results[best] * 1e-6, 1), torch_us=round(graph_us(sdpa, 2), 1),
                 all={k: round(v, 1) for k, v in results.items()})


def bench_attention(bench: Bench) -> None:
    for requests, length, queries in ((1, 256, 1), (1, 256, 4), (1, 3500, 1), (1, 3500, 4), (8, 256, 1), (8, 256, 4),
                                      (64, 256, 1), (64, 256, 4), (256, 256, 1), (256, 256, 4)):
        bench_decode(bench, requests, length, queries)
    bench_prefill(bench, 1, 2048)
    bench_prefill(bench, 16, 128)


# Small kernels


def bench_rows(bench: Bench, model: Model, num_tokens: int) -> None:
    x, residual, weight = randn(num_tokens, model.hidden), randn(num_tokens, model.hidden), randn(model.hidden)
    summed = residual + x
    normed = kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
    wanted = reference.rms_norm(summed.float(), weight.float(), 1e-5)
    error = must_be_close("add_rms_norm", relative_error(normed, wanted))
    us = graph_us(lambda i: kernels.add_rms_norm(x, residual, weight, 1e-5), 16)
    bench.report("add_rms_norm", f"{num_tokens} x {model.hidden}", us, 8 * x.numel(), error)
    fused = randn(num_tokens, 2 * model.mlp)
    error = must_be_close("silu_mul", relative_error(kernels.silu_mul(fused), reference.silu_mul(fused.float())))
    us = graph_us(lambda i: kernels.silu_mul(fused), 16)
    bench.report("silu_mul", f"{num_tokens} x {model.mlp}", us, 3 * fused.numel(), error)


def bench_rope(bench: Bench, model: Model, num_tokens: int) -> None:
    cache = make_cache(num_tokens, 64, 1, model, 1)
    qkv, table = randn(num_tokens, model.qkv), torch.randn(4096, model.head_dim, device="cuda")
    positions = torch.arange(num_tokens, device="cuda")
    slots = cache.page_table[:, 0].long() * 16 + 3
    norms = (randn(model.head_dim), randn(model.head_dim)) if model.qk_norm else (None, None)
    k_cache, v_cache = cache.args(0)[:2]
    wide, k_wide, v_wide = qkv.double(), k_cache.double(), v_cache.double()
    reference.rope_write(wide, positions, *table.double().chunk(2, -1), slots, k_wide, v_wide,
                         *(None if w is None else w.double() for w in norms))
    q = kernels.rope_cache_write(qkv, positions, table, slots, k_cache, v_cache, *norms)
    error = max(relative_error(q.flatten(1), wide[:, : q[0].numel()]), relative_error(k_cache, k_wide),
                relative_error(v_cache, v_wide))
    us = graph_us(lambda i: kernels.rope_cache_write(qkv, positions, table, slots, k_cache, v_cache, *norms), 16)
    bench.report("rope_cache_write", f"{num_tokens} tokens, norm={model.qk_norm}", us, 4 * qkv.numel(),
                 must_be_close("rope_cache_write", error))


def bench_sampling(bench: Bench, vocab: int, num_rows: int, temperature: float) -> None:
    logits = torch.randn(num_rows, vocab, device="cuda")
    temperatures = torch.full((num_rows,), temperature, device="cuda")
    seed = torch.arange(num_rows, device="cuda")
    zero = torch.zeros_like(seed)
    tokens = kernels.sample_logits(logits, temperatures, seed, zero, zero)
    if temperature == 0 and not torch.equal(tokens, logits.argmax(-1)):
        raise AssertionError("sample_logits: greedy tokens differ from argmax")
    us = graph_us(lambda i: kernels.sample_logits(logits, temperatures, seed, zero, zero), 8)
    torch_us = graph_us(lambda i: logits.argmax(-1), 8)
    bench.report("sample_logits", f"{num_rows} x {vocab} T={temperature}", us, 4 * logits.numel(),
                 torch_argmax_us=round(torch_us, 2))


def bench_small(bench: Bench) -> None:
    for num_tokens in (1, 64, 2048):
        for model in MODELS.values():
            bench_rows(bench, model, num_tokens)
            bench_rope(bench, model, num_tokens)
    for vocab, num_rows, temperature in ((128256, 1, 0.0), (128256, 1, 1.0), (151936, 256, 0.0), (151936, 256, 1.0)):
        bench_sampling(bench, vocab, num_rows, temperature)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="when to stop sweeping configurations")
    parser.add_argument("--out", type=Path, help="a file for the JSON lines")
    parser.add_argument("--only", default="chain,small,attention,linear", help="parts to run, in this order")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/kernel_times.py needs a CUDA device")
    torch.manual_seed(0)
    bench = Bench(options.seconds, options.out)
    parts = {"chain": bench_chains, "small": bench_small, "attention": bench_attention, "linear": bench_linears}
    for part in options.only.split(","):
        begun = time.monotonic()
        parts[part](bench)
        torch.cuda.empty_cache()
        print(f"# {part}: {time.monotonic() - begun:.1f} s", flush=True)
    print(bench.table())


if __name__ == "__main__":
    main()
