"""Costs of a step on the CPU: the linear products by number of token rows, attention by context, a whole lean step.

SmolLM2-135M's shapes with random weights; nothing is loaded or generated. Every figure is the best and the median of
interleaved repeats, because other work on the machine only ever adds time, and the best processor time of the calling
thread, from which being interrupted is left out.

    python bench/cpu_products.py [products] [attention] [step] [--threads 2] [--repeats 11]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.kernels.cpu.packed import PackedMatrix
from outrider.kernels.cpu.products import PACKED_FOR_ROWS, make_product
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.quantized import ACTIVATION_BITS, empty_rows

LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, LAYERS),
    "o": (HIDDEN, HEADS * DIM, LAYERS),
    "gate_up": (2 * WIDTH, HIDDEN, LAYERS),
    "down": (HIDDEN, WIDTH, LAYERS),
    "head": (VOCAB, HIDDEN, 1),
}
ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 512)
PAGE = 16
Figures = tuple[float, float, float]  # best, median, best processor time of the calling thread; milliseconds


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, Figures]:
    walls: dict[str, list[float]] = {name: [] for name in runs}
    busy: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start, busy_start = time.perf_counter(), time.thread_time()
            run()
            walls[name].append((time.perf_counter() - start) * 1e3)
            busy[name].append((time.thread_time() - busy_start) * 1e3)
    return {name: (min(wall), sorted(wall)[len(wall) // 2], min(busy[name])) for name, wall in walls.items()}


def show(label: str, figures: dict[str, Figures]) -> None:
    cells = (f"{name} {best:8.3f} ({median:8.3f}, {busy:8.3f})" for name, (best, median, busy) in figures.items())
    print(f"{label:>22}", *cells, flush=True)


def read_bandwidth(repeats: int) -> None:
    """The floor: with one token row the arithmetic is nothing beside the reading of the weights."""
    weight, x = torch.ones(1 << 18, 512), torch.ones(1, 512)
    best, median, _ = interleaved({"read": lambda: native.linear(x, weight)}, repeats)["read"]
    size = weight.nbytes
    print(f"reading {size >> 20} MiB: {size / best / 1e6:.1f} GB/s ({size / median / 1e6:.1f})")


def make_weights() -> dict[str, list[Tensor]]:
    """In numbers that bfloat16 holds too, so that the half-size copies are exact."""
    return {
        name: [(torch.randn(outputs, inputs) * 0.02).bfloat16().float() for _ in range(count)]
        for name, (outputs, inputs, count) in SHAPES.items()
    }


def kept_bits(kind: str) -> dict[str, list[native.Matrix]]:
    """Weights of random bits, on which no product depends for its time as long as scales are ordinary numbers: an x86
    processor takes a hundred times as long for numbers so small that they have fewer bits."""

    def matrix(outputs: int, inputs: int) -> native.Matrix:
        rows = empty_rows(kind, outputs, -(-inputs // KINDS[kind].block) * KINDS[kind].block, torch.device("cpu"))
        rows.data.random_(56, 60)
        return PackedMatrix([rows], None, ACTIVATION_BITS)

    return {name: [matrix(outputs, inputs) for _ in range(count)] for name, (outputs, inputs, count) in SHAPES.items()}


def bench_products(repeats: int) -> None:
    """All products of one step, layer by layer, so that weights come from memory as they do in a real step."""
    weights = make_weights()
    packed = {
        name: [torch.ops.mkldnn._reorder_linear_weight(w, PACKED_FOR_ROWS) for w in ws] for name, ws in weights.items()
    }
    halves = {name: [w.bfloat16() for w in ws] for name, ws in weights.items()}
    bits = {kind: kept_bits(kind) for kind in ("Q4_1", "Q8_0")}

    def sweep(product: Callable[..., Tensor], held: Mapping[str, Sequence[Any]], rows: int) -> Callable[[], None]:
        inputs = {name: torch.randn(rows, shape[1]) for name, shape in SHAPES.items()}

        def run() -> None:
            for layer in range(LAYERS):
                for name in ("qkv", "o", "gate_up", "down"):
                    product(inputs[name], held[name][layer])
            product(inputs["head"], held["head"][0])

        return run

    print("\nall products of a step, ms: best (median, processor time)")
    for rows in ROWS:
        runs: dict[str, Callable[[], object]] = {
            "library": sweep(F.linear, weights, rows),
            "packed": sweep(lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), packed, rows),
            "native": sweep(native.linear, weights, rows),
            "native half": sweep(native.linear, halves, rows),
            **{kind: sweep(native.product, held, rows) for kind, held in bits.items()},
        }
        show(f"{rows} token rows", interleaved(runs, repeats if rows <= 16 else max(3, repeats // 3)))


def make_cache(context: int) -> tuple[Tensor, Tensor, Tensor]:
    pages = context // PAGE + 2
    pool = torch.randn(pages, 2, PAGE, KV_HEADS, DIM)
    return pool[:, 0], pool[:, 1], torch.randperm(pages)[None, :].to(torch.int32)


def gathered_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Attention of one request by the library: gather its pages, then scaled_dot_product_attention."""
    k, v = (cache[table[0].long()].reshape(-1, KV_HEADS, DIM)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
    tokens = q.shape[0]
    mask = None if tokens == 1 else torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 0), v.repeat_interleave(HEADS // KV_HEADS, 0)
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask)


def bench_attention(repeats: int) -> None:
    print("\nattention of one layer, one request, ms: best (median, processor time)")
    decode = [(1, 32), (1, 512), (1, 2048), (1, 8192), (5, 32), (5, 512), (5, 2048), (5, 8192)]
    for tokens, context in [*decode, (32, 512), (128, 512), (512, 512), (512, 2048), (2048, 2048)]:
        k_cache, v_cache, table = make_cache(context)
        q = torch.randn(tokens, HEADS, DIM)
        starts, length, live = torch.tensor([0, tokens]), torch.tensor([context]), torch.tensor([tokens])
        runs: dict[str, Callable[[], object]] = {
            "native": partial(ops.paged_attention, q, k_cache, v_cache, table, starts, length, live, DIM**-0.5),
            "gathered": partial(gathered_attention, q, k_cache, v_cache, table, context),
        }
        show(f"{tokens} tokens at {context}", interleaved(runs, repeats * 3))


class LeanStep:
    """The operations of a SmolLM2 step in order, on random weights; `rows` tokens of one request."""

    def __init__(self, context: int, packed: bool) -> None:
        weights = make_weights()
        self.products = {name: [make_product(w, None, packed) for w in ws] for name, ws in weights.items()}
        self.norm = torch.ones(HIDDEN)
        self.caches = [make_cache(context) for _ in range(LAYERS)]
        self.cos, self.sin = torch.randn(context + PAGE, DIM // 2), torch.randn(context + PAGE, DIM // 2)
        self.context = context

    def run(self, rows: int) -> Tensor:
        positions = torch.arange(self.context - rows, self.context)
        starts, lengths, live = torch.tensor([0, rows]), torch.tensor([self.context]), torch.tensor([rows])
        table = self.caches[0][2]
        slots = table[0].long()[positions // PAGE] * PAGE + positions % PAGE
        residual = torch.randn(rows, HIDDEN)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        for layer, (k_cache, v_cache, _) in enumerate(self.caches):
            qkv = self.products["qkv"][layer](x)
            ops.rope_write(qkv, positions, self.cos, self.sin, slots, k_cache, v_cache)
            q = qkv[:, : HEADS * DIM].view(rows, HEADS, DIM)
            attended = ops.paged_attention(q, k_cache, v_cache, table, starts, lengths, live, 0.125)
            x = self.products["o"][layer](attended.view(rows, HEADS * DIM))
            x = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            x = self.products["down"][layer](ops.silu_mul(self.products["gate_up"][layer](x)))
            x = ops.add_rms_norm(x, residual, self.norm, 1e-5)
        return self.products["head"][0](x).argmax(-1)


def bench_step(repeats: int) -> None:
    for context in (160, 2048):
        steps = {"plain": LeanStep(context, packed=False), "half-size copies": LeanStep(context, packed=True)}
        extra = sum(product.extra_bytes for held in steps["half-size copies"].products.values() for product in held)
        print(f"\na lean step at context {context}, ms: best (median, processor time); copies: {extra >> 20} MiB")
        for rows in (1, 2, 3, 4, 5, 8, 16):
            runs: dict[str, Callable[[], object]] = {name: partial(step.run, rows) for name, step in steps.items()}
            show(f"{rows} token rows", interleaved(runs, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], help="products, attention, step; all if none is named")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    benches = {"products": bench_products, "attention": bench_attention, "step": bench_step}
    unknown = set(args.what) - set(benches)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(benches)}")
    print(f"native kernels: {'yes' if native.available() else native.reason()}; {args.threads} threads")
    with torch.inference_mode():
        read_bandwidth(args.repeats)
        for name in args.what or benches:
            benches[name](args.repeats)


if __name__ == "__main__":
    main()
