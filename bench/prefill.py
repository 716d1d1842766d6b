"""Checks and times prefill attention on the card: `python bench/prefill.py [--out FILE] [--seconds 200]`.

Every variant of the kernels runs in a process of its own, because a kernel that waits for ever can only be ended with
its process. Checks compare with the plain reference on ragged batches whose unused pages hold NaN; times are taken in
captured graphs at the shapes of real models, and given as TFLOP/s over the visible keys. Knows nothing of models beyond
their shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_harness import graph_us

from outrider.kernels import reference
from outrider.kernels.gpu.attention.prefill import (
    device_query_tiles,
    prefill_attention,
    prefill_config,
    query_tiles,
)
from outrider.kernels.gpu.hopper.prefill import CONFIGS, HopperConfig

NAN = float("nan")
DIMS = (128, 512, 256, 64)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    starts: bool = False
    dtype: str = "bfloat16"
    in_order: bool = False  # the pages of a request follow each other


@dataclass(frozen=True)
class Batch:
    """Requests as (length, scheduled tokens, live tokens)."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    live: torch.Tensor
    options: dict[str, Any]

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.page_table, self.query_starts, self.lengths, self.live)


def make_batch(shape: Shape, requests: list[tuple[int, int, int]], poisons: bool, padding: int = 0) -> Batch:
    """With `poisons`, pages and table entries that no live query may see hold NaN and numbers of no page."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    dtype = getattr(torch, shape.dtype)
    columns = max(1, max(-(-n // shape.page) for n, _, _ in requests)) + 2
    num_pages = 1 + columns * len(requests)
    size = (num_pages, 3, shape.page, shape.kv_heads, shape.dim)
    pool = torch.randn(size, device="cuda", generator=generator, dtype=torch.float32).to(dtype)
    order = torch.arange(num_pages - 1, device="cuda")
    if not shape.in_order:
        order = torch.randperm(num_pages - 1, device="cuda", generator=generator)
    order = (order + 1).view(len(requests), columns)
    table = order.to(torch.int32)
    key_starts = torch.tensor([min(n // 3, max(0, n - live)) for n, _, live in requests], dtype=torch.int32)
    if poisons:
        table = table.cpu()
        for r, (length, _, live) in enumerate(requests):
            first = 0 if shape.window is None else max(0, length - live - shape.window + 1)
            first = max(first, int(key_starts[r])) if shape.starts else first
            position = torch.arange(columns * shape.page, device="cuda")
            unseen = (position < first) | (position >= (length if live else 0))
            pages, offsets = order[r].repeat_interleave(shape.page)[unseen], (position % shape.page)[unseen]
            pool[pages, :, offsets] = NAN
            whole = unseen.view(columns, shape.page).all(dim=1).cpu()
            table[r, whole] = 1 << 30
        table = table.cuda()
        pool[0], pool[:, 2] = NAN, NAN
    starts = torch.tensor([0] + [n for _, n, _ in requests]).cumsum(0).to(torch.int32)
    num_tokens = int(starts[-1]) + padding
    q = torch.randn(num_tokens, shape.heads + 1, shape.dim, device="cuda", generator=generator, dtype=torch.float32)
    q = q.to(dtype)
    for r, (_, scheduled, live) in enumerate(requests if poisons else []):
        q[int(starts[r]) + live : int(starts[r]) + scheduled] = NAN
    options: dict[str, Any] = {"scale": shape.dim**-0.5, "window": shape.window, "softcap": shape.softcap}
    if shape.starts:
        options["key_starts"] = key_starts.cuda()
    ints = torch.tensor([[n, live] for n, _, live in requests], dtype=torch.int32, device="cuda").t().contiguous()
    return Batch(q[:, : shape.heads], pool[:, 0], pool[:, 1], table, starts.cuda(), ints[0], ints[1], options)


def run(batch: Batch, shape: Shape, config: Any, on_device: bool, **more: Any) -> torch.Tensor:
    heads = (shape.heads, shape.kv_heads, shape.dim)
    if on_device:
        tiles = device_query_tiles(batch.query_starts, batch.q.shape[0], 0, *heads, config=config)
    else:
        tiles = query_tiles(batch.query_starts.diff().tolist(), *heads, batch.q.device, config=config)
    return prefill_attention(*batch.args, tiles, **(batch.options | more))


RAGGED = [(300, 300, 300), (129, 0, 0), (517, 200, 133), (1, 1, 1), (640, 128, 128), (40, 33, 0), (261, 17, 16),
          (96, 96, 96)] * 4  # more tiles than programs
CHUNK = 133  # query tokens of the first request, alone


def check(shape: Shape, config: HopperConfig) -> dict[str, Any]:
    batch = make_batch(shape, RAGGED, poisons=True, padding=5)
    q, k, v = (t.float() for t in batch.args[:3])
    wanted = reference.paged_attention(q, k, v, *batch.args[3:], batch.options["scale"], shape.window or 0,
                                       shape.softcap or 0.0, key_starts=batch.options.get("key_starts"))
    errors = {}
    results = []
    for on_device in (False, True):
        out = torch.full_like(batch.q, 7.0)
        actual = run(batch, shape, config, on_device, out=out)
        results.append(actual.clone())
        difference = (actual.float() - wanted).abs()
        errors["device" if on_device else "host"] = float(difference.max()) if difference.isfinite().all() else NAN
        errors["rms_device" if on_device else "rms_host"] = float(difference.norm() / wanted.norm())
    again = [run(batch, shape, config, True) for _ in range(4)]
    alone = replace(
        batch, q=batch.q[300 - CHUNK : 300], page_table=batch.page_table[:1],
        query_starts=torch.tensor([0, CHUNK], dtype=torch.int32, device="cuda"), lengths=batch.lengths[:1],
        live=torch.full_like(batch.live[:1], CHUNK),
        options={k: v[:1] if k == "key_starts" else v for k, v in batch.options.items()})
    errors["chunked"] = torch.equal(run(alone, shape, config, True), results[1][300 - CHUNK : 300])
    errors["repeats"] = all(torch.equal(results[1], a) for a in again) and torch.equal(*results)
    return errors


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    requests: tuple[tuple[int, int, int], ...]

    def flops(self) -> float:
        pairs = 0
        for length, _, live in self.requests:
            position = torch.arange(length - live, length, dtype=torch.int64) + 1
            seen = position.clamp(max=self.shape.window) if self.shape.window else position
            pairs += int(seen.sum())
        return 4.0 * pairs * self.shape.heads * self.shape.dim


LLAMA, LLAMA64, GEMMA_LOCAL, GEMMA_GLOBAL = (
    Shape(32, 8, 128), Shape(32, 8, 128, page=64), Shape(16, 4, 256, window=512), Shape(16, 2, 512))
IN_ORDER = replace(LLAMA, in_order=True)
CASES = [
    Case("d128 1x128", LLAMA, ((128, 128, 128),)),
    Case("d128 1x512", LLAMA, ((512, 512, 512),)),
    Case("d128 8x32 behind 1000", LLAMA, ((1032, 32, 32),) * 8),
    Case("d128 1x2048", LLAMA, ((2048, 2048, 2048),)),
    Case("d128 1x8192", LLAMA, ((8192, 8192, 8192),)),
    Case("d128 1x8192 behind 22000", LLAMA, ((30192, 8192, 8192),)),
    Case("d128 16x512", LLAMA, ((512, 512, 512),) * 16),
    Case("d128 4x2048 behind 2000", LLAMA, ((4048, 2048, 2048),) * 4),
    Case("d128 1x8192 page 64", LLAMA64, ((8192, 8192, 8192),)),
    Case("d128 1x8192 behind 22000, 64", LLAMA64, ((30192, 8192, 8192),)),
    Case("d128 1x8192 in order", IN_ORDER, ((8192, 8192, 8192),)),
    Case("d128 1x8192 behind 22000, in order", IN_ORDER, ((30192, 8192, 8192),)),
    Case("d128/g16 1x8192", Shape(32, 2, 128), ((8192, 8192, 8192),)),
    Case("d64 1x8192", Shape(32, 8, 64), ((8192, 8192, 8192),)),
    Case("d256 1x8192", Shape(16, 4, 256), ((8192, 8192, 8192),)),
    Case("d256 1x8192 window 512", GEMMA_LOCAL, ((8192, 8192, 8192),)),
    Case("d256 1x8192 window 512, in order", replace(GEMMA_LOCAL, in_order=True), ((8192, 8192, 8192),)),
    Case("d512 1x8192 in order", replace(GEMMA_GLOBAL, in_order=True), ((8192, 8192, 8192),)),
    Case("d512 1x8192", GEMMA_GLOBAL, ((8192, 8192, 8192),)),
    Case("d512 1x4096 behind 4096", GEMMA_GLOBAL, ((8192, 4096, 4096),)),
]


def time_case(case: Case, config: Any) -> dict[str, Any]:
    batch = make_batch(case.shape, list(case.requests), poisons=False)
    out = torch.empty_like(batch.q)
    heads = (case.shape.heads, case.shape.kv_heads, case.shape.dim)
    tiles = device_query_tiles(batch.query_starts, batch.q.shape[0], 16, *heads, config=config)
    us = graph_us(lambda _: prefill_attention(*batch.args, tiles, out=out, **batch.options), 4)
    wanted = prefill_attention(*batch.args, query_tiles(batch.query_starts.diff().tolist(), *heads, batch.q.device,
                                                        config=prefill_config(case.shape.dim)), **batch.options)
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    return {"case": case.name, "us": round(us, 1), "tflops": round(case.flops() / us * 1e-6, 1), "error": error}


def time_library(case: Case) -> dict[str, Any]:
    """The library's attention over one dense prompt, without pages."""
    length, _, live = case.requests[0]
    q, k, v = (torch.randn(len(case.requests), heads, length, case.shape.dim, device="cuda", dtype=torch.bfloat16)
               for heads in (case.shape.heads, case.shape.kv_heads, case.shape.kv_heads))

    def attend(_: int) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    us = graph_us(attend, 4)
    return {"case": case.name, "us": round(us, 1), "tflops": round(case.flops() / us * 1e-6, 1), "error": 0.0}


def variants(dim: int) -> dict[str, Any]:
    base = asdict(CONFIGS[dim])

    def change(**fields: Any) -> HopperConfig:
        return HopperConfig(**(base | fields))

    made: dict[str, Any] = {"triton": prefill_config(dim), "hopper": change(), "40 regs": change(producer_regs=40)}
    if dim == 128:
        made["2 stages"] = change(num_stages=2)
    return made


CHECKS: list[tuple[Shape, HopperConfig]] = [
    *((Shape(8, 2, dim, page), CONFIGS[dim]) for dim, page in ((128, 16), (64, 16), (256, 16), (512, 16), (128, 128))),
    *((Shape(group * 2, 2, 128), CONFIGS[128]) for group in (1, 3, 5, 7, 12)),
    *((Shape(8, 2, dim, page=32, window=window), CONFIGS[dim]) for dim, window in ((128, 64), (256, 130), (512, 70))),
    *((Shape(8, 2, dim, softcap=20.0, starts=True, dtype="float16"), CONFIGS[dim]) for dim in (64, 512)),
    *((Shape(6, 2, dim, window=90, starts=True), CONFIGS[dim]) for dim in (128, 256)),
    (Shape(16, 2, 512, page=64), CONFIGS[512]),
    *((Shape(8, 2, dim, in_order=True), config) for dim, config in CONFIGS.items()),
    (Shape(8, 2, 256, window=130, starts=True, in_order=True), CONFIGS[256]),
    (Shape(8, 2, 128, page=32, in_order=True), CONFIGS[128]),
]


def time_dim(dim: int) -> None:
    cases = [case for case in CASES if case.shape.dim == dim]
    for name, config in variants(dim).items():
        for case in cases:
            print(json.dumps({"variant": name, **time_case(case, config)}), flush=True)
    for case in cases if dim <= 256 else []:
        if case.shape.window is None and case.requests[0][0] == case.requests[0][2]:
            print(json.dumps({"variant": "library", **time_library(case)}), flush=True)


def child(arguments: list[str], seconds: float) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as slow:
        text = (slow.stdout or b"").decode()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")] + [{"problem": "timed out"}]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows if done.returncode == 0 else [*rows, {"problem": done.stderr[-700:]}]


class Report:
    """Rows of results, printed as they come and kept in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines = path, list[str]()

    def note(self, row: dict[str, Any]) -> None:
        self._lines.append(json.dumps(row))
        print(self._lines[-1][:1500], flush=True)
        if self._path is not None:
            self._path.write_text("\n".join(self._lines) + "\n")


def compile_variant(dim: int, name: str) -> None:
    for shape in {case.shape for case in CASES if case.shape.dim == dim}:
        run(make_batch(shape, [(64, 64, 64)], poisons=False), shape, variants(dim)[name], on_device=True)
    torch.cuda.synchronize()


def is_good(row: dict[str, Any]) -> bool:
    return (row.get("problem") is None and row["rms_host"] < 1e-2 and row["rms_device"] < 1e-2 and row["repeats"]
            and row["chunked"] and math.isfinite(row["host"] + row["device"]))


def check_and_compile(report: Report, *, checks: bool, compiles: bool) -> None:
    """Many at once, while times could not be taken."""
    first = child(["--check", "0"], 60) if checks else []
    if any("problem" in row for row in first):
        for row in first:
            report.note(row)
        sys.exit("The first check failed, so the others are not tried.")
    tasks = [("--compile", str(dim), name) for dim in DIMS for name in variants(dim)] if compiles else []
    with ThreadPoolExecutor(15) as pool:
        ready = [pool.submit(child, list(arguments), 80) for arguments in tasks]
        checked = [pool.submit(child, ["--check", str(i)], 80) for i in range(len(CHECKS) if checks else 0)]
        for index, future in enumerate(checked):
            for row in future.result():
                report.note({"good": is_good(row), "index": index, "of": str(CHECKS[index]), **row})
        for arguments, future in zip(tasks, ready, strict=True):
            for row in future.result():
                report.note({"compile": arguments, **row})


def take_times(report: Report, ends: float) -> None:
    table: dict[str, dict[str, str]] = {}
    for dim in DIMS:
        left = ends - time.monotonic()
        for row in child(["--time", str(dim)], min(60, left)) if left > 5 else []:
            report.note({"dim": dim, **row})
            if "case" in row:
                mark = "" if row["error"] < 1e-2 else " WRONG"
                table.setdefault(row["case"], {})[row["variant"]] = f"{row['tflops']:.0f}{mark}"
    for case_name, columns in table.items():
        print(f"{case_name:28} " + "  ".join(f"{k}: {v}" for k, v in columns.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=int)
    parser.add_argument("--compile", nargs=2, metavar=("DIM", "VARIANT"))
    parser.add_argument("--time", type=int, metavar="DIM")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    began, report = time.monotonic(), Report(options.out)
    if options.check is not None:
        shape, config = CHECKS[options.check]
        print(json.dumps({"check": str(shape), "config": str(config), **check(shape, config)}), flush=True)
    elif options.compile is not None:
        compile_variant(int(options.compile[0]), options.compile[1])
    elif options.time is not None:
        time_dim(options.time)
    else:
        check_and_compile(report, checks=not options.no_checks, compiles=not options.no_times)
        print(f"# checks took {time.monotonic() - began:.0f} s", flush=True)
        if not options.no_times:
            take_times(report, began + options.seconds)


if __name__ == "__main__":
    main()
