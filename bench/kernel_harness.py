"""Parts that the kernel benchmarks share: shapes, cold inputs, timing in captured graphs, errors, and the report.

It knows the card's read bandwidth and the shapes of two models; nothing of any kernel.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.kernels.gpu import compiling_ahead, finish_compiling

BANDWIDTH = 4.4e12  # bytes per second, a plain read of device memory
COLD_BYTES = 256 << 20  # rotate over at least so many bytes: the cache holds about 60 MB
DTYPE = torch.bfloat16
Call = Callable[[int], Any]  # runs a kernel on input set i


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    qk_norm: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """name -> (outputs, inputs)"""
        return {
            "qkv": (self.qkv, self.hidden), "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.mlp, self.hidden), "down": (self.hidden, self.mlp), "head": (self.vocab, self.hidden),
        }


MODELS = {
    "llama8b": Model(4096, 32, 8, 128, 14336, 128256, False),
    "qwen06b": Model(1024, 16, 8, 128, 3072, 151936, True),
}


@dataclass
class Bench:
    """Collects cases, and keeps to a time budget: sweeps stop when it is spent, checks never do."""

    seconds: float
    out: Path | None
    started: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_time(self) -> bool:
        return time.monotonic() - self.started < self.seconds

    def report(
        self, kernel: str, case: str, us: float, num_bytes: float, error: float | None = None, **more: Any
    ) -> None:
        row = {"kernel": kernel, "case": case, "us": round(us, 2), "floor_us": round(num_bytes / BANDWIDTH * 1e6, 2),
               "tb_per_s": round(num_bytes / us * 1e-6, 3), "error": error, **more}
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")

    def table(self) -> str:
        lines = [f"{'kernel':18} {'case':34} {'us':>9} {'floor':>8} {'TB/s':>6} {'error':>9}  more"]
        for row in self.rows:
            more = {k: v for k, v in row.items() if k not in ("kernel", "case", "us", "floor_us", "tb_per_s", "error")}
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            lines.append(f"{row['kernel']:18} {row['case']:34} {row['us']:9.2f} {row['floor_us']:8.2f} "
                         f"{row['tb_per_s']:6.2f} {error:>9}  {' '.join(f'{k}={v}' for k, v in more.items())}")
        return "\n".join(lines)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def sets(num_bytes: float) -> int:
    return max(2, min(64, math.ceil(COLD_BYTES / max(1, num_bytes))))


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 7) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[1:])[repeats // 2]


def graph_us(call: Call, count: int) -> float:
    """Microseconds of one call inside a graph of calls over `count` input sets."""
    for i in range(count):
        call(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = [call(i) for i in range(count)]  # results stay alive: every call writes its own memory
    us = replay_us(graph) / count
    del keep
    return us


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30))


def must_be_close(what: str, error: float, limit: float = 1e-2) -> float:
    if not error < limit:  # NaN fails too
        raise AssertionError(f"{what}: relative error {error} is not below {limit}")
    return float(f"{error:.3g}")


def compile_all(calls: list[Callable[[], Any]]) -> None:
    """Compiles many variants at once; a variant the compiler refuses shows again, and loudly, when it is timed."""
    with compiling_ahead():
        for call in calls:
            call()
    finish_compiling()


@dataclass(frozen=True)
class Cache:
    """Keys and values of several layers in one pool, and one ragged-free batch over them."""

    pool: torch.Tensor  # [pages, layers, 2, page size, kv heads, dim]
    page_table: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    live: torch.Tensor

    def args(self, layer: int) -> tuple[torch.Tensor, ...]:
        return (self.pool[:, layer, 0], self.pool[:, layer, 1], self.page_table, self.query_starts, self.lengths,
                self.live)


def make_cache(requests: int, length: int, queries: int, model: Model, layers: int, page_size: int = 16) -> Cache:
    columns = math.ceil(length / page_size)
    pool = randn(requests * columns + 1, layers, 2, page_size, model.kv_heads, model.head_dim)
    pages = torch.randperm(requests * columns, device="cuda").to(torch.int32) + 1
    full = torch.full((requests,), 1, device="cuda", dtype=torch.int32)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * queries
    return Cache(pool, pages.view(requests, columns), starts, full * length, full * queries)
