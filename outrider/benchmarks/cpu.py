"""`outrider bench cpu`: this engine beside llama.cpp and ik_llama.cpp on GGUF files, on this machine's processors.

The engines take turns, and medians count. Each figure is followed by the processor time that a token took, which other
programs disturb less than the clock. The ratio is to the better of the others. Last line: JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.benchmarks.busy_time import SHARED, Span
from outrider.benchmarks.cpu_engines import (
    Case,
    EngineFails,
    LlamaEngine,
    Measured,
    MeasuredEngine,
    OwnEngine,
    find_tool,
)
from outrider.commands.env import cpu_name
from outrider.commands.loading import load
from outrider.commands.output_files import check_result_file
from outrider.commands.parser import engine_config
from outrider.core.status_line import say, status_line
from outrider.models.sources import resolve

OWN, EIGHT_BITS = "outrider", "outrider, 8-bit rows"
FEWER_BITS = 8  # of token rows, as llama.cpp has them
CACHE_BYTES = 1 << 29


@dataclass(frozen=True)
class TableRow:
    """One line of the table: a number of tokens in a part of a case's time."""

    title: str
    case: Case
    is_prompt: bool

    def of(self, measured: Measured) -> tuple[Span, int]:
        if self.is_prompt:
            return measured.prompt, self.case.prompt_len
        return measured.decode, measured.num_decoded


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds. None where the system does not tell processor time."""

    tok_s: float
    processor_ms: float | None  # for each token
    others: float | None  # share of the machine that other programs used

    @classmethod
    def median(cls, rounds: Sequence[tuple[Span, int]]) -> Speed:
        own = [span.own / tokens * 1e3 for span, tokens in rounds if span.own is not None]
        others = [span.others for span, _ in rounds if span.others is not None]
        return cls(statistics.median(tokens / span.wall for span, tokens in rounds),
                   statistics.median(own) if own else None, statistics.median(others) if others else None)

    def __str__(self) -> str:
        return f"{self.tok_s:.1f}" + ("" if self.processor_ms is None else f" ({self.processor_ms:.2f} ms)")


def run(args: argparse.Namespace) -> int:
    check_result_file(args.save_result)
    peers = {"llama.cpp": args.llama, "ik_llama.cpp": args.ik}
    folders = {name: folder for name, folder in peers.items() if folder is not None}
    for folder in folders.values():
        find_tool(folder)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    rows = list(_rows(args))
    report: dict[str, Any] = {"bench": "cpu", "outrider": __version__, "cpu": cpu_name(), "machine": platform.machine(),
                              "threads": torch.get_num_threads(), "rounds": args.rounds, "results": []}
    print("tokens a second, in brackets the processor time of one token; ratios to the better of the others, by the "
          "clock and by processor time")
    for name in args.models:
        path = Path(resolve(name).path)
        print(f"\n{path.name}, {torch.get_num_threads()} threads, medians of {args.rounds}", flush=True)
        with ExitStack() as held:
            engines: list[MeasuredEngine] = [*_own_engines(args, path, rows, held)]
            engines += (LlamaEngine(one, folder, path, torch.get_num_threads()) for one, folder in folders.items())
            for row, speeds in _measure(engines, rows, args.rounds):
                report["results"].append(_line(path.name, row, speeds))
        gc.collect()  # the weights of this model, before those of the next
    print(json.dumps(report))
    if args.save_result:
        Path(args.save_result).write_text(json.dumps(report) + "\n")
    return 0


def _rows(args: argparse.Namespace) -> Iterator[TableRow]:
    for requests in args.requests:
        for context in args.contexts:
            title = f"{requests} request{'s' if requests > 1 else ''} behind {context:,} tokens"
            yield TableRow(title, Case(context, requests, args.new_tokens), is_prompt=False)
    for length in args.prompts:
        new_tokens = args.new_tokens if 1 in args.requests and length in args.contexts else 1
        yield TableRow(f"prompt of {length:,} tokens", Case(length, 1, new_tokens), is_prompt=True)


def _own_engines(args: argparse.Namespace, path: Path, rows: Sequence[TableRow],
                 held: ExitStack) -> Iterator[OwnEngine]:
    args.model = str(path)
    cases = [row.case for row in rows]
    longest = max(case.prompt_len + case.new_tokens + 1 for case in cases)
    config = engine_config(args, device="cpu", speculative_config=None, max_model_len=longest,
                           max_num_seqs=max(case.requests for case in cases), kv_cache_memory_bytes=CACHE_BYTES)
    configs = {OWN: config}
    if not hasattr(args, "activation_bits"):
        configs[EIGHT_BITS] = replace(config, activation_bits=FEWER_BITS)
    for name, own in configs.items():
        loaded = load(own, needs_text=False)
        yield OwnEngine(name, held.enter_context(loaded.llm(own)), loaded.model.vocab_size)


def _measure(engines: list[MeasuredEngine], rows: Sequence[TableRow],
             rounds: int) -> Iterator[tuple[TableRow, dict[str, Speed]]]:
    """Measure every case once for all its rows, and yield the rows as soon as they are known. An engine that fails is
    left out of that case."""
    for case in dict.fromkeys(row.case for row in rows):
        found: dict[str, list[Measured]] = {engine.name: [] for engine in engines}
        for turn in range(rounds):
            with status_line(f"{case.requests} x {case.context}: round {turn + 1} of {rounds}"):
                for engine in _rotated([engine for engine in engines if engine.name in found], turn):
                    try:
                        found[engine.name].append(engine.measure(case))
                    except EngineFails as failure:
                        say(f"{engine.name} is left out here: {failure}")
                        del found[engine.name]
        for row in rows:
            if row.case == case:
                yield row, {name: Speed.median([row.of(one) for one in measured]) for name, measured in found.items()}


def _rotated(engines: list[MeasuredEngine], turn: int) -> list[MeasuredEngine]:
    """Another engine goes first in every round, so that work that comes and goes favours none."""
    at = turn % len(engines)
    return engines[at:] + engines[:at]


def _line(model: str, row: TableRow, speeds: dict[str, Speed]) -> dict[str, Any]:
    """Print a row of the table, and return it as values."""
    own = {name: speed for name, speed in speeds.items() if name.startswith(OWN)}
    others = [speed for name, speed in speeds.items() if name not in own]
    ratios = {name: _ratios(speed, others) for name, speed in own.items()} if others else {}
    words = [f"{name} {speed}" for name, speed in speeds.items()]
    if ratios:
        words.append("ratio " + "; ".join(", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in pair)
                                          for pair in ratios.values()))
    taken = max((speed.others or 0.0 for speed in speeds.values()), default=0.0)
    if taken > SHARED:
        words.append(f"other programs had {taken:.0%} of this machine: too busy for the clock to tell")
    print(f"{row.title:<32}", *words, sep="   ", flush=True)
    return {"model": model, "case": row.title, "engines": {name: asdict(speed) for name, speed in speeds.items()},
            "ratios": ratios, "too_busy": taken > SHARED}


def _ratios(own: Speed, others: list[Speed]) -> tuple[float, float | None]:
    """How many times as fast as the best of the others: by the clock, and by processor time."""
    by_clock = own.tok_s / max(other.tok_s for other in others)
    least = min((other.processor_ms for other in others if other.processor_ms), default=None)
    return by_clock, least / own.processor_ms if least and own.processor_ms else None
