"""Decoder layers made of our kernels alone: what launches, gaps and dependent launch cost together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_harness import (
    MODELS,
    Bench,
    Cache,
    Model,
    compile_all,
    make_cache,
    randn,
    replay_us,
)

from outrider.kernels import gpu as kernels
from outrider.kernels.gpu import decode_attention, matvec, thin_linear

VARIANTS = (False, True)  # programmatic dependent launch


@dataclass(frozen=True)
class Chain:
    """Decoder layers made of our kernels alone, with their own weights and cache."""

    model: Model
    weights: list[dict[str, torch.Tensor]]
    cache: Cache
    table: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    gain: torch.Tensor
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    queries: int

    def run(self, x: torch.Tensor, pdl: bool) -> torch.Tensor:
        for layer, w in enumerate(self.weights):
            x = self._layer(x.clone() if layer == 0 else x, layer, w, pdl)
        return x

    def _layer(self, x: torch.Tensor, layer: int, w: dict[str, torch.Tensor], pdl: bool) -> torch.Tensor:
        linear = matvec if x.shape[0] == 1 else thin_linear
        model, cache = self.model, self.cache.args(layer)
        qkv = linear(self._norm(x, pdl), w["qkv"], pdl=pdl)
        q = kernels.rope_cache_write(qkv, self.positions, self.table, self.slots, *cache[:2], *self.norms, pdl=pdl)
        a = decode_attention(q, *cache, scale=model.head_dim**-0.5, max_query=self.queries,
                             max_length=self.cache.page_table.shape[1] * 16, pdl=pdl)
        x = linear(a.flatten(1), w["o"], residual=x, pdl=pdl)
        gate_up = linear(self._norm(x, pdl), w["gate_up"], pdl=pdl)
        return linear(kernels.silu_mul(gate_up, pdl=pdl), w["down"], residual=x, pdl=pdl)

    def _norm(self, x: torch.Tensor, pdl: bool) -> torch.Tensor:
        return kernels.rms_norm(x, self.gain, 1e-5, pdl=pdl)


def make_chain(model: Model, layers: int, num_rows: int, length: int = 256) -> Chain:
    shapes = {name: shape for name, shape in model.linears().items() if name != "head"}
    weights = [{name: randn(n, k) * k**-0.5 for name, (n, k) in shapes.items()} for _ in range(layers)]
    cache = make_cache(1, length, num_rows, model, layers)
    positions = torch.arange(length - num_rows, length, device="cuda")
    slots = cache.page_table[0, positions // 16].long() * 16 + positions % 16
    norms = (randn(model.head_dim), randn(model.head_dim)) if model.qk_norm else (None, None)
    angles = torch.rand(length, model.head_dim // 2, device="cuda")
    table = torch.cat((angles.cos(), angles.sin()), -1)
    return Chain(model, weights, cache, table, positions, slots, randn(model.hidden), norms, num_rows)


def bench_chain(bench: Bench, name: str, chain: Chain, x: torch.Tensor) -> None:
    model, layers, num_rows = chain.model, len(chain.weights), x.shape[0]
    num_bytes = 2 * sum(n * k for part, (n, k) in model.linears().items() if part != "head")
    outputs: dict[bool, torch.Tensor] = {}
    for pdl in VARIANTS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs[pdl] = chain.run(x, pdl)
        us = replay_us(graph) / layers
        if pdl and not torch.equal(outputs[True], outputs[False]):
            raise AssertionError(f"chain {name}: dependent launch changes the result, so a kernel did not wait")
        bench.report("layer chain", f"{name} rows={num_rows}{' pdl' if pdl else ''}", us, num_bytes)


def bench_chains(bench: Bench) -> None:
    cases = []
    for name, layers in (("llama8b", 8), ("qwen06b", 28)):
        for num_rows in (1, 4):
            chain = make_chain(MODELS[name], layers, num_rows)
            cases.append((name, chain, randn(num_rows, chain.model.hidden)))
    compile_all([lambda c=chain, x=x, v=v: c.run(x, v) for _, chain, x in cases for v in VARIANTS])
    for name, chain, x in cases:
        bench_chain(bench, name, chain, x)
