"""Capacity of 1 to 1,024 GPUs by simulation: the tables and the plot of docs/simulation.md, from a cost table.

    outrider bench costs bench/configs/llama8b --load-format dummy --dtype bfloat16 --max-num-seqs 256 \
        --max-model-len 4096 --gpu-memory-utilization 0.85 -o bench/results/costs_llama8b.json
    python bench/capacity.py bench/results/costs_llama8b.json --plot docs/capacity     (--quick: fewer of both)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.commands.simulated_routing import ROUTERS
from outrider.simulation.cluster import Cluster
from outrider.simulation.cost_table import CostTable
from outrider.simulation.plot import plot_capacity
from outrider.simulation.ranks import Link, over_ranks
from outrider.simulation.trace import ClosedLoad, LognormalLength, OpenLoad, Shapes, SharedPrefixes

LINK = Link(bandwidth=4e11, latency=8e-6)  # NVLink of one machine, and a sum in one kernel
COUNTS = (1, 8, 64, 1024)
COLUMNS = {"utilisation": "busy", "output_throughput": "tok/s", "p50_ttft_ms": "first token p50, ms",
           "p99_ttft_ms": "p99", "p50_itl_ms": "gap p50, ms", "p99_itl_ms": "p99", "mean_e2el_ms": "whole, mean, ms",
           "prefix_hit_rate": "hits", "mean_page_use": "pages"}


def shapes(prefixes: SharedPrefixes | None = None) -> Shapes:
    return Shapes(LognormalLength(512, 0.5, 2048), LognormalLength(128, 0.5, 512), prefixes, seed=0, most=2800)


def capacity(table: CostTable) -> float:
    """Requests per second of one replica that always has as many as it may run."""
    clients = table.info.limits.max_requests
    load = ClosedLoad(shapes(), 3 * clients, clients)
    return float(Cluster(table, 1, ROUTERS["round-robin"]()).run(load).summary()["request_throughput"])


def simulate(table: CostTable, num_replicas: int, rate: float, seconds: float, router: str = "least-load",
             prefixes: SharedPrefixes | None = None) -> dict[str, Any]:
    """seconds: for which requests arrive. A request takes about a second, so that few seconds are mostly the start."""
    load = OpenLoad(shapes(prefixes), round(rate * seconds), rate)
    return Cluster(table, num_replicas, ROUTERS[router]()).run(load).summary()


def show(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    print(f"\n| {title} | {' | '.join(COLUMNS.values())} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
    for name, row in rows:
        values = (f"{row[key]:.3g}" if row[key] < 100 else f"{row[key]:.0f}" for key in COLUMNS)
        print(f"| {name} | {' | '.join(values)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs")
    parser.add_argument("--plot", help="write NAME.png and NAME.svg")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, 1 and 8 GPUs alone")
    args = parser.parse_args(argv)
    table, seconds = CostTable.read(Path(args.costs)), 2.0 if args.quick else 20.0
    most = capacity(table)
    print(f"one replica serves at most {most:.1f} requests/s; 70% of that is {0.7 * most:.1f}")
    show("GPUs", [(str(count), simulate(table, count, 0.7 * most * count, seconds / 4 if count > 64 else seconds))
                  for count in COUNTS[: 2 if args.quick else None]])
    shared = SharedPrefixes(200, 1024)
    show("16 GPUs, shared beginnings", [(router, simulate(table, 16, 0.5 * most * 16, seconds, router, shared))
                                        for router in ROUTERS])
    show("8 GPUs as replicas x ranks", [(f"{8 // ranks} x {ranks}", simulate(over_ranks(table, ranks, LINK), 8 // ranks,
                                                                            0.5 * most * 8, seconds))
                                        for ranks in (1, 2, 4, 8)])
    if args.plot:
        rows = [{"replicas": count, "load": share, **simulate(table, count, share * most * count, seconds)}
                for count in COUNTS[:2] for share in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)]
        plot_capacity(rows, Path(args.plot), f"{table.model.name}: output tokens/s by share of the capacity")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
