"""Times the kernels of recurrent layers on the card: `python bench/recurrent.py [--only mamba2] [--no-sweep]`.

One layer and step at the shapes of Nemotron-H (mamba2), Qwen3-Next (delta) and Kimi-Linear (kda), in captured graphs
over rows larger than the cache. The floor is one read and one write of the states that the batch has, for any number of
drafts. Checked against the torch path by tests/kernels/test_triton_recurrent.py, not here.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_harness import DTYPE, Bench, compile_all, graph_us, randn, sets

from outrider.kernels.gpu.gated_delta.prepare import PrepareConfig
from outrider.kernels.gpu.gated_delta.steps import ChunkConfig, delta_config, delta_steps
from outrider.kernels.gpu.recurrent.inputs import ConvParams, GateKind, GateParams, recurrent_inputs
from outrider.kernels.gpu.recurrent.mamba2 import mamba2_config, mamba2_steps
from outrider.kernels.gpu.recurrent.save_tails import save_tails
from outrider.kernels.gpu.recurrent.step_tensors import (
    LayerTensors,
    StepConfig,
    StepInputs,
    StepTensors,
)
from outrider.kernels.recurrent import CheckpointTargets

CONV_WIDTH = 4
PAGE_ELEMENTS = 16 * 2 * 2 * 128 * 6  # a page of 16 tokens, 2 heads of keys and values, 6 layers


@dataclass(frozen=True)
class Shape:
    kind: GateKind
    heads: int
    dim: int
    n: int
    groups: int  # of B and C, or key heads
    gates: tuple[int, ...]  # numbers of each gate of a token

    @property
    def conv_dim(self) -> int:
        return self.heads * self.dim + 2 * self.groups * self.n

    @property
    def state_bytes(self) -> int:
        return self.heads * self.dim * self.n * 4

    @property
    def checkpoint_pages(self) -> int:
        return -(-(self.state_bytes + 6 * self.conv_dim) // (2 * PAGE_ELEMENTS))


SHAPES = {"mamba2": Shape("mamba2", 64, 64, 128, 8, (64,)), "delta": Shape("delta", 32, 128, 128, 16, (32, 32)),
          "kda": Shape("kda", 32, 128, 128, 32, (32 * 128, 32))}


@dataclass
class Layer:
    """Rows of one layer and a batch over all of them, each request with the same counts."""

    shape: Shape
    rows: LayerTensors
    step: StepTensors
    projected: torch.Tensor
    targets: CheckpointTargets | None
    made: StepInputs | None = None

    @classmethod
    def of(cls, shape: Shape, requests: int, known: int, drafts: int, window: int, pending: int,
           saves: bool = False) -> Layer:
        rows, heads = requests + 1, shape.heads
        state = torch.zeros(rows, heads, shape.dim, shape.n, device="cuda")
        pages = shape.checkpoint_pages * requests if saves else 0
        pool = torch.zeros(1 + pages, PAGE_ELEMENTS, device="cuda", dtype=DTYPE)
        layer = LayerTensors(state, randn(rows, CONV_WIDTH - 1, shape.conv_dim), randn(rows, window, shape.conv_dim),
                             tuple(randn(rows, window, size) for size in shape.gates), pool, 0)
        index = torch.arange(requests + 1, device="cuda")
        tokens, full = known + drafts, torch.ones_like(index[1:])
        step = StepTensors.stack(index[1:], index * tokens, 15 * full, known * full, drafts * full, pending * full,
                              torch.arange(requests, device="cuda").repeat_interleave(tokens))
        columns = shape.heads * shape.dim + shape.conv_dim + sum(shape.gates)
        return cls(shape, layer, step, randn(requests * tokens, columns), cls.saved(shape, requests) if saves else None)

    @staticmethod
    def saved(shape: Shape, requests: int) -> CheckpointTargets:
        """Every sixteenth request passes a boundary with its known token, and all have a target."""
        index = torch.arange(requests + 1, device="cuda")
        boundary, pages = torch.where(index[:-1] % 16 == 0, 16, -1), shape.checkpoint_pages
        return CheckpointTargets(index, index[:-1], boundary,
                                 1 + torch.arange(requests * pages, device="cuda").view(requests, pages))

    def split(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        _, conv_in, *gates = self.projected.split(
            (self.shape.heads * self.shape.dim, self.shape.conv_dim, *self.shape.gates), dim=-1
        )
        return conv_in, tuple(gates)

    def inputs(self, params: Params, tile: tuple[int, int, int] | None = None) -> StepInputs:
        conv_in, gates = self.split()
        self.made = recurrent_inputs(self.step, conv_in, gates, self.rows, params.conv, params.gate, tile=tile)
        if self.targets is not None:
            save_tails(self.step, conv_in, self.rows, self.targets)
        return self.made

    def states(self, params: Params, **options: Any) -> torch.Tensor:
        assert self.made is not None
        if self.shape.kind != "mamba2":
            return delta_steps(self.step, self.made, self.rows, num_key_heads=self.shape.groups, targets=self.targets,
                               per_channel=self.shape.kind == "kda", **options)
        return mamba2_steps(self.step, self.made, self.rows, params.gate.decay, params.skip,
                            num_groups=self.shape.groups, targets=self.targets, **options)


@dataclass(frozen=True)
class Params:
    conv: ConvParams
    gate: GateParams
    skip: torch.Tensor

    @classmethod
    def of(cls, shape: Shape) -> Params:
        heads, dt_bias = torch.randn(2, shape.heads, device="cuda"), torch.randn(shape.gates[0], device="cuda")
        conv = ConvParams(randn(CONV_WIDTH, shape.conv_dim).float(), randn(shape.conv_dim).float())
        return cls(conv, GateParams(shape.kind, dt_bias, -heads[0].exp()), heads[1].contiguous())


def time_steps(bench: Bench, shape: Shape, params: Params, requests: int, drafts: int, *, sweep: bool,
               saves: bool = False) -> None:
    window, pending = drafts, drafts // 2
    num_bytes = 2 * requests * shape.state_bytes
    layers = [Layer.of(shape, requests, 1, drafts, window, pending, saves) for _ in range(sets(num_bytes / 2))]
    case = f"{requests} requests, {drafts} drafts{', checkpoints' if saves else ''}"

    def both(i: int) -> torch.Tensor:
        layers[i].inputs(params)
        return layers[i].states(params, **({} if shape.kind == "mamba2" else {"follows_inputs": True}))

    bench.report(f"{shape.kind} both", case, graph_us(both, len(layers)), num_bytes)
    bench.report(f"{shape.kind} inputs", case, graph_us(lambda i: layers[i].inputs(params).convolved, len(layers)),
                 6 * requests * (1 + drafts + pending) * shape.conv_dim)  # read in bf16, written in float32
    bench.report(f"{shape.kind} states", case, graph_us(lambda i: layers[i].states(params), len(layers)), num_bytes)
    configs = [StepConfig(*c) for c in itertools.product((8, 16, 32, 64), (1, 2, 4, 8)) if 4 <= c[0] * 4 // c[1] <= 64]
    if not sweep or not bench.has_time:
        return
    compile_all([partial(layers[0].states, params, config=config) for config in configs])
    for config in configs:
        us = graph_us(partial(_with_config, layers, params, config), len(layers))
        bench.report(f"{shape.kind} states", case, us, num_bytes, tile=config.tile, warps=config.num_warps)


def _with_config(layers: list[Layer], params: Params, config: StepConfig, i: int) -> torch.Tensor:
    return layers[i].states(params, config=config)


def time_prompts(bench: Bench, shape: Shape, params: Params, requests: int, known: int, *, sweep: bool) -> None:
    """Long runs, in chunks: bound by products and by their order, not by memory."""
    layer = Layer.of(shape, requests, known, 0, 0, 0)
    case = f"{requests} prompts of {known}"
    num_bytes = layer.projected.numel() * 2
    bench.report(f"{shape.kind} inputs", case, graph_us(lambda _: layer.inputs(params).convolved, 1), num_bytes)
    run: Callable[..., torch.Tensor] = partial(layer.states, params, chunked=True)
    bench.report(f"{shape.kind} chunks", case, graph_us(lambda _: run(), 1), num_bytes)
    if not sweep or not bench.has_time:
        return
    for rows, channels, warps in ((8, 128, 2), (4, 256, 2), (8, 256, 4), (16, 128, 4), (16, 256, 8), (4, 512, 4)):
        us = graph_us(lambda _, tile=(rows, channels, warps): layer.inputs(params, tile).convolved, 1)
        bench.report(f"{shape.kind} inputs", case, us, num_bytes, rows=rows, channels=channels, warps=warps)
    swept = mamba2_sweep() if shape.kind == "mamba2" else delta_sweep()
    compile_all([partial(run, **options) for _, options in swept])
    for named, options in swept:
        if not bench.has_time:
            return
        try:
            us = graph_us(lambda _, options=options: run(**options), 1)
        except Exception as error:  # a tile that does not fit the card says so here
            print(f"# {named}: {type(error).__name__}", flush=True)
            continue
        bench.report(f"{shape.kind} chunks", case, us, num_bytes, **named)


Sweep = list[tuple[dict[str, Any], dict[str, Any]]]  # (what the report says, options of the kernel's wrapper)


def mamba2_sweep() -> Sweep:
    return [({"tile": tile, "warps": warps, "chunk": chunk}, {"config": StepConfig(tile, warps), "chunk": chunk})
            for tile, warps, chunk in itertools.product((16, 32, 64), (4, 8), (16, 32, 64))]


def delta_sweep() -> Sweep:
    """First the launch of the states, then that of the preparing kernel, each with the other's default."""
    found: Sweep = []
    for tile, warps, chunk, stages, y in itertools.product((16, 32, 64), (2, 4, 8), (16, 32), (2, 3),
                                                           ("tf32x3", "tf32")):
        if 4 <= tile // warps <= 16:
            named = {"tile": tile, "warps": warps, "chunk": chunk, "stages": stages, "y_precision": y}
            found.append((named, {"config": StepConfig(tile, warps), "chunks": ChunkConfig(chunk, stages),
                                  "y_precision": y}))
    for chunk, piece, warps in itertools.product((16, 32, 64), (16, 32, 64), (1, 2, 4)):
        if 8 <= chunk * piece // (32 * warps) <= 16:  # numbers of a matrix that a thread has; more do not fit
            chunks = ChunkConfig(chunk, 2, PrepareConfig(piece, warps))
            found.append(({"chunk": chunk, "piece": piece, "prepare_warps": warps}, {"chunks": chunks}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(SHAPES))
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--prompts", action="store_true", help="long runs alone")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which sweeps stop")
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args.seconds, args.out)
    for name, shape in SHAPES.items():
        if args.only in (None, name):
            params = Params.of(shape)
            for requests, drafts in itertools.product((1, 8, 64, 256), () if args.prompts else (0, 3, 7)):
                time_steps(bench, shape, params, requests, drafts, sweep=not args.no_sweep and drafts == 3)
            if not args.prompts:
                time_steps(bench, shape, params, 64, 3, sweep=False, saves=True)
            for requests, known, is_swept in ((1, 2048, False), (8, 1024, False), (64, 128, True), (1, 8192, True)):
                time_prompts(bench, shape, params, requests, known, sweep=is_swept and not args.no_sweep)
    print(bench.table())
    print("# defaults:", mamba2_config(1, 64, False), mamba2_config(64, 64, False), mamba2_config(1, 64, True),
          delta_config(128, False), delta_config(128, True), ChunkConfig())


if __name__ == "__main__":
    main()
