"""`outrider simulate`: capacity of one or many engines, from a cost table and a load. Last line: JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.commands.output_files import check_plot, check_result_file
from outrider.commands.parser import UsageError
from outrider.commands.simulated_routing import ROUTERS
from outrider.simulation.cluster import Cluster
from outrider.simulation.cost_table import CostTable
from outrider.simulation.plot import plot_capacity
from outrider.simulation.ranks import Link, over_ranks
from outrider.simulation.trace import (
    ClosedLoad,
    Load,
    OpenLoad,
    RecordedLoad,
    Shapes,
    SharedPrefixes,
    parse_lengths,
)

MOST_RANKS = 72  # GPUs that one NVLink domain connects
LEAST = 1e-9  # a smaller rate or chance counts as 0
LONG_WAIT = 0.25  # median wait for a first token, as a share of the time in which all requests arrive
SHOWN = ("replicas", "load", "request_throughput", "output_throughput", "utilisation", "mean_page_use",
         "prefix_hit_rate", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "mean_e2el_ms")


def run(args: argparse.Namespace) -> int:
    check_result_file(args.save_result)
    check_plot(args.plot)
    table = _table(args)
    rows: list[dict[str, Any]] = []
    print("  ".join(SHOWN))
    for replicas in args.replicas:
        for amount, make_load in _loads(args, table):
            start = time.perf_counter()
            cluster = Cluster(table, replicas, ROUTERS[args.router](), seed=args.seed, skips=not args.step_by_step)
            summary = cluster.run(make_load()).summary()
            rows.append({"replicas": replicas, "load": amount, **summary,
                         "simulated_in": time.perf_counter() - start})
            print("  ".join(f"{_shown(rows[-1].get(name, 0.0)):>{len(name)}}" for name in SHOWN), flush=True)
    print("load: requests per second, or clients of a closed loop; times in ms: ttft to the first token, itl between "
          "tokens, e2el of a whole request")
    if args.rate is not None:
        _report_overload(rows)
    if args.plot:
        for path in plot_capacity(rows, Path(args.plot), f"{table.model.name}, simulated"):
            print(f"wrote {path}")
    text = json.dumps({"model": table.model.name, "device": table.info.device_name, "ranks": args.ranks,
                       "router": args.router, "seed": args.seed, "rows": rows})
    if args.save_result:
        Path(args.save_result).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def _shown(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def _report_overload(rows: list[dict[str, Any]]) -> None:
    """Print the rows of the table in which the load was too high: the median wait is so long that the queue must have
    grown as long as requests arrived."""
    for row in rows:
        arrivals = row["completed"] / row["load"]
        if row["p50_ttft_ms"] * 1e-3 > LONG_WAIT * arrivals:
            print(f"replicas {row['replicas']}, load {row['load']:g}: half of the requests wait for more than "
                  f"{LONG_WAIT:.0%} of the {arrivals:.3g} s in which all arrive. The load is more than can be served, "
                  "or --num-requests is too small to tell")


def _table(args: argparse.Namespace) -> CostTable:
    table = CostTable.read(Path(args.costs))
    if args.acceptance is not None:
        table = replace(table, acceptance=tuple(_numbers("--acceptance", args.acceptance, most=1)))
    if args.ranks > MOST_RANKS:
        raise UsageError(f"--ranks must be at most {MOST_RANKS}, the devices of one machine; got {args.ranks}")
    table = replace(table, host=replace(table.host, start=table.host.start + args.front_ms * 1e-3))
    if len({place.name for place in args.tier}) < len(args.tier):
        raise UsageError("--tier: give host and disk at most once each")
    if args.tier:
        table = replace(table, places=tuple(sorted(args.tier, key=lambda place: place.name != "host")))
    return over_ranks(table, args.ranks, Link(args.link_gb_s * 1e9, args.link_us * 1e-6))


def _loads(args: argparse.Namespace, table: CostTable) -> Iterator[tuple[float, Callable[[], Load]]]:
    """Yield each load that the flags ask for, with its rate or number of clients."""
    given = [name for name in ("rate", "concurrency", "trace") if getattr(args, name) is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of --rate, --concurrency and --trace")
    most = table.info.limits.max_len
    if args.trace is not None:
        recorded = RecordedLoad(Path(args.trace))
        if recorded.longest > most:
            raise UsageError(f"--trace: the longest request has {recorded.longest} tokens, and the cost table is of an "
                             f"engine with max_model_len {most}: leave longer requests out, or make a table with a "
                             "larger max_model_len")
        yield 0.0, lambda: recorded
        return
    shapes = _shapes(args, most)
    if args.rate is None:
        for clients in args.concurrency:
            yield clients, partial(_closed, args, shapes, clients)
        return
    for rate in _numbers("--rate", args.rate):
        yield rate, partial(_open, args, shapes, rate)


def _closed(args: argparse.Namespace, shapes: Callable[[], Shapes], num_clients: int) -> Load:
    return ClosedLoad(shapes(), args.num_requests, num_clients)


def _open(args: argparse.Namespace, shapes: Callable[[], Shapes], rate: float) -> Load:
    return OpenLoad(shapes(), args.num_requests, rate, burst=args.burst, seed=args.seed)


def _shapes(args: argparse.Namespace, max_len: int) -> Callable[[], Shapes]:
    """A source of request shapes that the engine can serve: prefix, prompt and answer have at most max_len tokens in
    all."""
    prefixes = None if args.prefixes is None else SharedPrefixes(args.prefixes, args.prefix_len, args.zipf)
    room = max_len - (0 if prefixes is None else prefixes.length)
    if room < 2:
        raise UsageError(f"--prefix-len: a prefix of {args.prefix_len} tokens leaves no room for a prompt and an "
                         f"answer, because the cost table is of an engine with max_model_len {max_len}: lower "
                         "--prefix-len")
    try:
        prompts, outputs = parse_lengths(args.input_len, room - 1), parse_lengths(args.output_len, room - 1)
    except ValueError as error:
        raise UsageError(f"--input-len, --output-len: {error}") from None
    return lambda: Shapes(prompts, outputs, prefixes, args.seed, room)


def _numbers(flag: str, text: str, most: float = 1e9) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(LEAST <= number <= most for number in numbers):
        raise UsageError(f"{flag}: {text!r} must be one number, or several separated by commas, each above 0 and at "
                         f"most {most:g}")
    return numbers
