"""Every figure of sparse attention beside its bar: `python bench/sparse.py [--only tables,contexts] [--out FILE]`.

Engines run in processes of their own through `outrider bench`, in the conditions of the README's table; attention of a
long prompt is timed layer by layer in an engine of two layers; the dense kernel runs over caches larger than the card's
own. `--dry-run` does all of it with tiny models on the CPU, where the bars mean nothing, to show that the script works.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from outrider.benchmarks.roofline import measure_bandwidth
from outrider.benchmarks.throughput import GREEDY
from outrider.kernels import ops
from outrider.kernels.latent import TokenContexts
from outrider.llm import LLM
from outrider.mixers.latent.latent_mixer import BoundLatentLayer
from outrider.mixers.paged.backend import PagedLayer
from outrider.models.sources.folder import read_config

SPARSE, DENSE = "dsv32-8b-a2b", "llama8b"
BATCHES = (1, 8, 64, 256)
PLAIN_BARS, MTP_BARS = (500, 3300, 19000, 37000), (800, 5000, 24000, 40000)
FLOOR_SHARE, FLOOR_BATCHES = 0.6, (1, 8, 64)
MTP = {"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
       "synthetic_acceptance_length": 2.5}
TINY_SPARSE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 48, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8, "vocab_size": 512,
    "dtype": "float32",
}
TINY_DENSE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
                              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
                              "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run: the full ones for a card, small ones for a dry run on a CPU."""

    device: str
    batches: tuple[int, ...] = BATCHES
    prompt: int = 128
    answer: int = 256
    short: int = 2000
    long: int = 64000
    drafted: int = 8000  # context of the comparison with drafts
    many: int = 8  # requests behind long contexts
    decoded: int = 128
    whole: int = 30000  # tokens of the prompt whose attention is timed
    chunk: int = 8192
    rounds: int = 2
    tables: tuple[str, ...] = ("learned", "spread")

    def longest(self, length: int) -> int:
        """Room for a context and its answer, and for the prompts by which `outrider bench` warms up."""
        return max(96, length + self.decoded + 16)


CARD = Sizes("cuda")
DRY = Sizes("cpu", (1, 2), 8, 4, 40, 120, 60, 2, 6, 130, 64, 1)


@dataclass
class Report:
    has_bars: bool  # a dry run has none
    figures: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, value: float, least: float | None = None, most: float | None = None) -> None:
        if not self.has_bars:
            least = most = None
        is_met = (least is None or value >= least) and (most is None or value <= most)
        bar = "" if least is None and most is None else f"  bar {'>=' if most is None else '<='} {least or most}"
        verdict = "" if not bar else "  met" if is_met else "  MISSED"
        print(f"{name}: {value:.4g}{bar}{verdict}", flush=True)
        self.figures.append({"name": name, "value": value, "least": least, "most": most, "met": is_met})


@dataclass(frozen=True)
class Bench:
    """The folders of both models, and where results are kept."""

    sizes: Sizes
    folder: Path
    report: Report

    def config(self, name: str, **changes: Any) -> Path:
        """A folder with the model's config: the committed one unless something is changed, or the tiny one."""
        tiny = (TINY_SPARSE if name == SPARSE else TINY_DENSE) if self.sizes.device == "cpu" else {}
        if not tiny and not changes:
            return ROOT / "bench" / "configs" / name
        folder = self.folder / f"{name}-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        values = read_config(ROOT / "bench" / "configs" / name) | tiny | changes
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
        return folder

    def run(self, kind: str, shapes: list[str], max_len: int, *more: str, drafts: bool = False) -> dict[str, Any]:
        """One `outrider bench` in a process of its own, with an empty cache of kernels."""
        result = self.folder / f"result-{len(list(self.folder.iterdir()))}.json"
        batches = [int(shape.split("x")[0]) for shape in shapes]
        given = [sys.executable, "-m", "outrider.cli", "bench", kind, str(self.config(SPARSE)),
                 "--load-format", "dummy", "--device", self.sizes.device, "--max-model-len", str(max_len),
                 "--max-num-seqs", str(max(batches)), "--gpu-memory-utilization", "0.85", "--shapes", ",".join(shapes),
                 "--rounds", str(self.sizes.rounds), "--save-result", str(result), *more]
        if drafts:
            given += ["--speculative-config", json.dumps(MTP)]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        caches = tempfile.mkdtemp(dir=self.folder)
        subprocess.run(given, check=True, stdout=subprocess.DEVNULL, cwd=ROOT,
                       env=os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": caches})
        made: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return made


def tables(bench: Bench) -> None:
    """Plain and with drafts, by batch; then with experts that are spread, beside the floor. First token time."""
    sizes, report = bench.sizes, bench.report
    shapes = [f"{batch}x{sizes.prompt}x{sizes.answer}" for batch in sizes.batches]
    max_len = max(4096 if sizes.device == "cuda" else 0, sizes.longest(sizes.prompt + sizes.answer))
    for routing in sizes.tables:
        for drafts, bars in ((False, PLAIN_BARS), (True, MTP_BARS)):
            made = bench.run("throughput", shapes, max_len, "--routing", routing, drafts=drafts)
            name = f"{'MTP' if drafts else 'plain'}, {routing} routing"
            report.details[name] = made
            for batch, row, bar in zip(sizes.batches, made["results"], bars, strict=False):
                learned = routing == "learned"
                report.note(f"{name}, batch {batch}, tokens/s", row["out_tok_s"], bar if learned else None)
                least = None if learned or drafts or batch not in FLOOR_BATCHES else FLOOR_SHARE
                floor = f"share of the floor of {row['floor_tok_s']}"
                report.note(f"{name}, batch {batch}, {floor}", row["of_floor"], least)
            report.note(f"{name}, first token after the engine's making, s", made["start_s"], most=12.0)


def contexts(bench: Bench) -> None:
    """A decode step behind long contexts, and drafts behind one of medium length."""
    sizes, report = bench.sizes, bench.report
    steps = []
    for length in (sizes.short, sizes.long):
        shape = f"{sizes.many}x{length}x{sizes.decoded}"
        made = bench.run("latency", [shape], sizes.longest(length))["results"][0]
        steps.append(made["decoding_ms_p50"])
        report.note(f"decode step behind {length} tokens, batch {sizes.many}, ms", steps[-1])
    report.note("step behind the long context over the short one", steps[1] / steps[0], most=1.4)
    shape = f"{sizes.many}x{sizes.long}x{sizes.decoded}"
    rounded = bench.run("latency", [shape], sizes.longest(sizes.long), "--index-key-dtype", "fp8")["results"][0]
    report.note(f"decode step behind {sizes.long} tokens, index keys in fp8, ms", rounded["decoding_ms_p50"])
    shape = f"{sizes.many}x{sizes.drafted}x{sizes.decoded}"
    plain, drafted = (bench.run("latency", [shape], sizes.longest(sizes.drafted), drafts=drafts)["results"][0]
                      for drafts in (False, True))
    report.note(f"plain at {sizes.drafted} tokens, ms a token", plain["decoding_ms_p50"])
    report.note(f"MTP at {sizes.drafted} tokens, ms a token", drafted["decoding_ms_p50"])
    report.note("MTP over plain", plain["decoding_ms_p50"] / drafted["decoding_ms_p50"], least=1.3)


def dense_kernel(bench: Bench) -> None:
    """The dense kernel's share of the bandwidth of a plain read, one token row for each of some long contexts."""
    sizes, config = bench.sizes, read_config(bench.config(SPARSE))
    device, on_card = torch.device(sizes.device), sizes.device == "cuda"
    page, length, dtype = 64, sizes.long, torch.bfloat16 if on_card else torch.float32
    columns = -(-length // page)
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    cache = torch.randn(1 + sizes.many * columns, page, width, device=device, dtype=dtype)
    pages = (1 + torch.randperm(sizes.many * columns, device=device)).int().view(sizes.many, columns)
    index = torch.arange(sizes.many, device=device)
    view = TokenContexts(pages, index, torch.zeros_like(index), torch.full_like(index, length))
    q = torch.randn(sizes.many, config["num_attention_heads"], width, device=device, dtype=dtype)

    def attend() -> torch.Tensor:
        return ops.dense_latent_attention(q, cache, view, length, width**-0.5, config["kv_lora_rank"])

    seconds = seconds_of(attend, device)
    rate = sizes.many * length * width * dtype.itemsize / seconds
    bandwidth = measure_bandwidth(device)
    bench.report.note(f"dense kernel, {sizes.many} contexts of {length}, us", seconds * 1e6)
    bench.report.note(f"dense kernel over a plain read of {bandwidth / 1e12:.2f} TB/s", rate / bandwidth, least=0.6)


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of a call, on CUDA of a captured one."""
    times = []
    call()
    if device.type == "cuda":
        from kernel_harness import graph_us

        return graph_us(lambda _: call(), repeats) * 1e-6
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


class LayerClock:
    """Seconds that calls of a layer's attention take on the device, by their names."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.layer = device, 1  # the first layer may do what others share
        self.spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def watching(self, kind: type, *names: str) -> Iterator[None]:
        before = {name: getattr(kind, name) for name in names}
        for name, call in before.items():
            setattr(kind, name, self._timed(name, call))
        try:
            yield
        finally:
            for name, call in before.items():
                setattr(kind, name, call)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(bound: Any, *args: Any) -> Any:
            if bound.layer.index != self.layer:
                return call(bound, *args)
            begin = self._now()
            made = call(bound, *args)
            self.spans[name].append((begin, self._now()))
            return made

        return timed

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_ms(self) -> dict[str, float]:
        """Milliseconds by name since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        made = {name: sum(begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin)
                          for begin, end in spans) for name, spans in self.spans.items()}
        self.spans.clear()
        return made


def prompt(bench: Bench) -> None:
    """One layer's attention over a long prompt in chunks: writes, choice and attention, beside the dense model's."""
    totals = {}
    for name, kind, calls in ((SPARSE, BoundLatentLayer, ("write", "choose", "__call__")),
                              (DENSE, PagedLayer, ("__call__", "fused"))):
        totals[name] = _attention_ms(bench, name, kind, calls)
        for call, ms in totals[name].items():
            print(f"{name}, {bench.sizes.whole} tokens, one layer, {call.strip('_')}: {ms:.3f} ms", flush=True)
    sparse, dense = (sum(totals[name].values()) for name in (SPARSE, DENSE))
    bench.report.details["prompt"] = totals
    bench.report.note("indexer and attention of a layer, ms", sparse)
    bench.report.note(f"{DENSE}'s attention of a layer, ms", dense)
    bench.report.note("over the dense model's", sparse / dense, most=2.0)


def _attention_ms(bench: Bench, name: str, kind: type, calls: tuple[str, ...]) -> dict[str, float]:
    sizes = bench.sizes
    clock, ask = LayerClock(torch.device(sizes.device)), replace(GREEDY, max_tokens=1)
    longest = sizes.longest(sizes.whole)
    with clock.watching(kind, *calls):
        llm = LLM(str(bench.config(name, num_hidden_layers=2)), load_format="dummy", device=sizes.device,
                  max_model_len=longest, max_num_seqs=1, max_num_batched_tokens=sizes.chunk, enforce_eager=True,
                  enable_prefix_caching=False, gpu_memory_utilization=0.5)
        best: dict[str, float] = {}
        with llm:
            for _ in range(1 + sizes.rounds):
                clock.spans.clear()
                llm.generate(prompt_token_ids=[[100 + i % 300 for i in range(sizes.whole)]], sampling_params=ask,
                             use_tqdm=False)
                made = clock.take_ms()
                best = made if not best or sum(made.values()) < sum(best.values()) else best
    return best


SECTIONS: dict[str, Callable[[Bench], None]] = {"tables": tables, "contexts": contexts, "dense": dense_kernel,
                                                "prompt": prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, help="a file for the report")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    args = parser.parse_args()
    report = Report(has_bars=not args.dry_run)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(DRY if args.dry_run else CARD, Path(folder), report)
        for name in args.only.split(","):
            print(f"== {name}", flush=True)
            SECTIONS[name](bench)
    missed = [one["name"] for one in report.figures if not one["met"]]
    made = json.dumps({"figures": report.figures, "missed": missed, "details": report.details})
    if args.out is not None:
        args.out.write_text(made + "\n", encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
