"""`outrider bench throughput`, `latency` and `steps`: random prompts of given shapes, no prefix hits. Last line: JSON.

Throughput is shown beside the highest one that memory bandwidth allows (`roofline`). The prompts depend on the seed and
the list of shapes alone, so other engines can be measured with the same prompts: one stream of random numbers gives 64
prompts for a warm-up, then the prompts of every shape in turn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.benchmarks.prompt_work import four_digits, measure_product, prompt_speed
from outrider.benchmarks.roofline import Decoding, measure_bandwidth
from outrider.benchmarks.server_load import percentile
from outrider.benchmarks.step_listing import StepRecorder, list_steps
from outrider.benchmarks.worker_facts import CountExperts, DecodingBytes, PromptOperations, ReadExperts
from outrider.commands.env import cpu_name, version_of
from outrider.commands.loading import Loaded, OnRanks, load_or_find
from outrider.commands.output_files import check_result_file
from outrider.commands.parser import UsageError, engine_config, sampling_params
from outrider.commands.run_prompts import Ask, run_prompts
from outrider.config import EngineConfig
from outrider.core import RequestOutput, SamplingParams
from outrider.drafters.base import Drafter
from outrider.layers import Router, SpreadRouting, find_modules
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.runner.device import pick_device

log = logging.getLogger("outrider")

LOWEST_ID, HIGHEST_ID = 100, 30000
WARM_UP = (64, 16)  # tokens in and out
NANO = "nano"  # many requests of mixed lengths
NANO_REQUESTS, NANO_LENGTHS = 256, (100, 1024)
COUNTED_TOKENS = 16  # answer tokens of the extra run that counts experts


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass
class BestSpeed:
    """The highest measured speed of a device. Other programs can make a measurement slower, never faster."""

    look: Callable[[], float]
    best: float = 0.0

    def measure(self) -> None:
        self.best = max(self.best, self.look())

    def share(self, speed: float) -> float:
        """Divide a speed by the best one. If the speed is higher than the best one, that is measured again first."""
        if speed > self.best:
            self.measure()
        return speed / self.best


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    prompt_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        if text == NANO:
            return cls(text, NANO_REQUESTS, NANO_LENGTHS[1], NANO_LENGTHS[1])
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and 0 < int(part) < 10**7 for part in parts):
            raise UsageError(f"--shapes: {text!r} must be BATCHxINxOUT, such as 8x128x256, or nano")
        return cls(text, *map(int, parts))


@dataclass(frozen=True)
class Workload:
    shape: Shape
    prompts: list[list[int]]
    output_lens: list[int]
    sampling: SamplingParams = GREEDY
    num_sampled: int | None = None  # requests that `sampling` goes for, None for all; the others are greedy

    def asks(self) -> list[Ask]:
        num = len(self.prompts) if self.num_sampled is None else self.num_sampled
        return [
            Ask(prompt, replace(self.sampling if i < num else GREEDY, max_tokens=length))
            for i, (prompt, length) in enumerate(zip(self.prompts, self.output_lens, strict=True))
        ]


def workloads(shapes: Sequence[Shape], seed: int, vocab_size: int) -> tuple[Workload, list[Workload]]:
    """Make the workload of the warm-up, and one for every shape."""
    source = random.Random(seed)
    highest = min(HIGHEST_ID, vocab_size - 1)
    lowest = min(LOWEST_ID, highest)

    def prompt(length: int) -> list[int]:
        return [source.randint(lowest, highest) for _ in range(length)]

    warm_up = Workload(Shape("warm-up", 1, *WARM_UP), [prompt(WARM_UP[0])], [WARM_UP[1]])
    made = []
    for shape in shapes:
        if shape.name == NANO:
            source.seed(seed)
            prompts = [prompt(source.randint(*NANO_LENGTHS)) for _ in range(shape.batch)]
            lengths = [source.randint(*NANO_LENGTHS) for _ in range(shape.batch)]
        else:
            prompts = [prompt(shape.prompt_len) for _ in range(shape.batch)]
            lengths = [shape.output_len] * shape.batch
        made.append(Workload(shape, prompts, lengths))
    return warm_up, made


def run(args: argparse.Namespace) -> int:
    shapes = [Shape.parse(text) for text in args.shapes.split(",") if text]
    if not shapes:
        raise UsageError("--shapes must be at least one of BATCHxINxOUT, such as 8x128x256, or nano")
    most = max(shape.batch for shape in shapes)
    config = engine_config(args, speculative_config=None, max_num_seqs=most, enable_prefix_caching=False)
    check_result_file(args.save_result)
    if config.tensor_parallel_size > 1 and args.routing == "spread":
        raise UsageError("--routing spread changes a model in this process, and with -tp the model runs in other "
                         "processes: leave one of the two flags out")
    bandwidth = BestSpeed(partial(measure_bandwidth, pick_device(config.device)))
    bandwidth.measure()
    start = time.perf_counter()
    loaded = load_or_find(config, needs_text=False)
    loading_seconds = time.perf_counter() - start
    product = BestSpeed(partial(measure_product, loaded.device, loaded.outline.dtype))
    if args.kind == "throughput":
        product.measure()
    start = time.perf_counter() - loading_seconds  # measuring is no part of starting
    with _started(loaded, config, spreads=args.routing == "spread") as llm:
        warm_up, work = workloads(shapes, config.seed, llm.engine.limits.vocab_size)
        sampling = sampling_params(args)
        work = [replace(one, sampling=sampling, num_sampled=args.sampled_requests) for one in work]
        for one in work:
            _check_fits(llm, one)
        run_prompts(llm, replace(warm_up, output_lens=[1]).asks())
        start_seconds, process_seconds = time.perf_counter() - start, _process_seconds()
        run_prompts(llm, warm_up.asks())
        rows = []
        for one in work:
            if args.kind == "throughput":
                rows.append(_throughput(llm, one, args.rounds, bandwidth, product))
            elif args.kind == "latency":
                rows.append(_latency(llm, one, args.rounds))
            else:
                rows.append(_steps(llm, one, args.rounds, args.slowest))
                continue
            print(_line(rows[-1]), flush=True)
    _explain(args, config, rows, bandwidth.best, product.best)
    report = _conditions(args, config, loaded) | {
        "start_s": round(start_seconds, 2), "process_s": process_seconds,
        "bandwidth_gb_s": round(bandwidth.best / 1e9, 1), "product_tflop_s": four_digits(product.best / 1e12),
        "date": datetime.date.today().isoformat(), "card": _card(loaded.device), "versions": _versions(),
        "results": rows}
    if args.save_result is not None:
        Path(args.save_result).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


def _explain(args: argparse.Namespace, config: EngineConfig, rows: list[dict[str, Any]], bandwidth: float,
             product: float) -> None:
    """Print the meaning of the columns, and notes that are needed to interpret the figures."""
    if config.speculative is not None and config.speculative.is_synthetic:
        print("acceptance was synthetic: the text is not the model's")
    if args.routing == "spread":
        print("experts were drawn, not chosen by the routers: the text is not the model's")
    if args.kind == "throughput":
        print("s: seconds of the best round; first_s: of the first; of_first: the best's share of the first's\n"
              "step_mb: megabytes that a decode step must read and write in one device's memory, in the mean\n"
              f"floor_tok_s: speed if only that took time, at {bandwidth / 1e9:.1f} GB/s; "
              "prompts are not counted\n"
              "prompts_s: until all first tokens were there; prompt_tflop_s: operations of prompts in that time\n"
              f"of_product: that over the {four_digits(product / 1e12):g} TFLOP/s of one large product of torch; "
              "above 1 where kernels of our own are faster")
        if any(row["of_floor"] is None for row in rows):
            print("of_floor: none where a run was faster than reading memory allows: the processor's caches hold the "
                  "weights, or other programs slowed each look at the memory")


def _started(loaded: Loaded | OnRanks, config: EngineConfig, *, spreads: bool) -> LLM:
    if isinstance(loaded, OnRanks):
        return loaded.llm(config)
    return loaded.llm(config, loaded.worker(config, prepare=spread_experts) if spreads else None)


def _conditions(args: argparse.Namespace, config: EngineConfig, loaded: Loaded | OnRanks) -> dict[str, Any]:
    """The settings that the caller chose, which are reported with the result."""
    return {"bench": args.kind, "model": loaded.name, "device": str(loaded.device),
            "ranks": config.tensor_parallel_size, "dtype": str(loaded.outline.dtype).removeprefix("torch."),
            "seed": config.seed, "speculative_config": config.speculative_config, "routing": args.routing,
            "sampling": _asked(sampling_params(args)), "sampled_requests": args.sampled_requests}


def _process_seconds() -> float | None:
    """Seconds since the process began; None if the system does not say when that was."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return round(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 2)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _versions() -> dict[str, str]:
    found = {package: version_of(package) for package in ("torch", "triton")}
    return {"outrider": __version__, "python": platform.python_version(),
            **{package: number for package, number in found.items() if number is not None}}


def spread_experts(model: Model, drafter: Drafter | None) -> None:
    routers = find_modules([model, *([] if drafter is None else drafter.modules())], Router)
    if not routers:
        raise UsageError("--routing spread: this model has no experts to choose among: leave --routing out")
    override = SpreadRouting(routers, device=model.device)
    for router in routers:
        router.routing_override = override


def _check_fits(llm: LLM, work: Workload) -> None:
    longest = max(len(p) + n for p, n in zip(work.prompts, work.output_lens, strict=True))
    max_len = llm.engine.limits.max_len
    if longest > max_len:
        raise UsageError(f"--shapes: {work.shape.name} needs {longest} tokens and max_model_len is {max_len}: raise "
                         "--max-model-len, or leave this shape out")


def _throughput(llm: LLM, work: Workload, rounds: int, bandwidth: BestSpeed, product: BestSpeed) -> dict[str, Any]:
    """Run several rounds of one case. Returns the figures of the fastest round and the time of the first. A round lasts
    from the first request to the last token."""
    before = llm.engine.stats.copy()
    ran = [run_prompts(llm, work.asks(), label=f"{work.shape.name} round {i + 1}") for i in range(rounds)]
    best = min(ran, key=lambda one: one.seconds)
    row: dict[str, Any] = {"case": work.shape.name, "s": round(best.seconds, 3), "first_s": round(ran[0].seconds, 3),
                           "of_first": round(best.seconds / ran[0].seconds, 3),
                           "out_tok_s": round(best.tokens_per_second, 1)}
    stats = llm.engine.stats.since(before)
    log.info("%s: %s", work.shape.name, stats.uncaptured_line)
    if llm.engine.limits.max_drafts:
        row |= {"mean_run": round(stats.mean_run_length, 3), "drafted": stats.num_draft_tokens,
                "accepted": stats.num_accepted_tokens,
                "acceptance_per_position": [round(rate, 3) for rate in stats.acceptance_per_position]}
    distinct = _distinct_experts(llm, work)
    if distinct is not None:
        row["distinct_experts"] = round(distinct, 2)
    lengths = [(len(p), n) for p, n in zip(work.prompts, work.output_lens, strict=True)]
    decoding = Decoding(lengths, max(1.0, stats.mean_run_length), stats.mean_chosen, distinct)
    moved = llm.engine.command(DecodingBytes(decoding))
    of_floor = bandwidth.share(best.tokens_per_second * moved / decoding.num_tokens)
    row |= {"step_mb": round(moved / decoding.num_steps / 1e6, 1),
            "floor_tok_s": round(decoding.num_tokens / (moved / bandwidth.best), 1),
            "of_floor": round(of_floor, 3) if of_floor <= 1 else None}
    operations = llm.engine.command(PromptOperations(tuple(len(output.prompt_token_ids) for output in best.outputs)))
    return row | prompt_speed(operations, best.outputs, product.share)


def _steps(llm: LLM, work: Workload, rounds: int, num_slowest: int) -> dict[str, Any]:
    """Print the steps of every round, and return them."""
    recorder, listed = StepRecorder(), []
    llm.engine.trace = recorder
    for index in range(rounds):
        seconds = run_prompts(llm, work.asks(), label=f"{work.shape.name} round {index + 1}").seconds
        lines, found = list_steps(recorder.take(), num_slowest)
        print(f"{work.shape.name} round {index + 1}: {seconds:.3f} s, {found['steps']} steps", *lines, sep="\n",
              flush=True)
        listed.append({"s": round(seconds, 3), **found})
    return {"case": work.shape.name, "rounds": listed}


def _distinct_experts(llm: LLM, work: Workload) -> float | None:
    """The mean number of different experts of a layer that a decode step uses; None for a model without experts. It is
    counted in a separate, shorter run without captured steps, so that counting does not disturb a measurement."""
    if not llm.engine.command(CountExperts(work.shape.batch * (1 + llm.engine.limits.max_drafts))):
        return None
    try:
        run_prompts(llm, replace(work, output_lens=[min(n, COUNTED_TOKENS) for n in work.output_lens]).asks(),
                    label="counting experts")
    finally:
        distinct = llm.engine.command(ReadExperts())
    return distinct


def _latency(llm: LLM, work: Workload, rounds: int) -> dict[str, Any]:
    """Measure the time to the first token, the time between steps' tokens (a run of one or more), and two times per
    token: after the first token, and while all requests decode, when no prompt is computed."""
    first: list[float] = []
    between: list[float] = []
    per_token: list[float] = []
    decoding: list[float] = []
    for i in range(rounds):
        requests = list(_timed(llm, work, f"{work.shape.name} round {i + 1}"))
        decoding += _decoding([times[1:] for times in requests])
        for times in requests:
            arrival, runs = times[0], times[1:]
            first.append(runs[0][0] - arrival[0])
            between += [later[0] - earlier[0] for earlier, later in zip(runs, runs[1:], strict=False)]
            if runs[-1][1] > runs[0][1]:
                per_token.append((runs[-1][0] - runs[0][0]) / (runs[-1][1] - runs[0][1]))
    row: dict[str, Any] = {"case": work.shape.name}
    for name, values in (("ttft_ms", first), ("between_runs_ms", between), ("per_token_ms", per_token),
                         ("decoding_ms", decoding)):
        row |= {f"{name}_p50": _percentile(values, 50), f"{name}_p99": _percentile(values, 99)}
    return row


def _decoding(requests: list[list[tuple[float, int]]]) -> Iterator[float]:
    """Yield the seconds per token of each request while all requests decode, that is, after all have their first token
    and before any ends. It is the median time between two runs, divided by the mean tokens of a run. `requests`: see
    `_timed`."""
    begin, end = max(runs[0][0] for runs in requests), min(runs[-1][0] for runs in requests)
    for runs in requests:
        inside = [run for run in runs if begin <= run[0] <= end]
        if inside and inside[-1][1] > inside[0][1]:
            times = [at for at, _ in inside]
            between = statistics.median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
            yield between * (len(inside) - 1) / (inside[-1][1] - inside[0][1])


def _timed(llm: LLM, work: Workload, label: str) -> Iterator[list[tuple[float, int]]]:
    """Yields for each request the pairs (time, tokens so far) at arrival and after every run."""
    runs: dict[str, list[tuple[float, int]]] = {}

    def note(output: RequestOutput) -> None:
        arrival = (output.metrics.arrival_time, 0)
        runs.setdefault(output.request_id, [arrival]).append((time.perf_counter(), len(output.outputs[0].token_ids)))

    run_prompts(llm, work.asks(), on_output=note, label=label)
    yield from runs.values()


def _asked(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from those of a greedy request."""
    return {field.name: getattr(params, field.name) for field in fields(params)
            if getattr(params, field.name) != getattr(GREEDY, field.name)}


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    """The percentile, converted from seconds to milliseconds."""
    return round(percentile(seconds, percent) * 1e3, 3) if seconds else None


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())
