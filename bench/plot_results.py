"""Draws bench/results/h200.json as docs/h200.svg: tokens per second beside the peer's, by batch; and
bench/results/spec_cpu.json, the last line of `outrider bench spec`, as docs/spec_cpu.svg.

A series has rows of "batch" and "tok_s"; with "peer" in every row bars are relative to the peer, and a "floor" (tokens
per second at the bandwidth of memory, as `outrider bench throughput` prints it) is a mark above them where it is near
enough. A series without a peer, as those with spread routing, is drawn relative to its floor.

    python bench/plot_results.py

Needs the plot extra. The figures come from `outrider bench throughput`; see docs/benchmarks.md for the commands.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from outrider.benchmarks.plot import plot_spec

ROOT = Path(__file__).parent.parent
COLUMNS = 5  # of plots


def short(speed: float) -> str:
    return f"{speed:,.0f}" if speed < 10000 else f"{speed / 1000:.1f}k"


def draw(axis: Any, entry: dict[str, Any]) -> None:
    rows = entry["rows"]
    has_peer = all("peer" in row for row in rows)
    bases = [row["peer"] if has_peer else row["floor"] for row in rows]
    ratios = [row["tok_s"] / base for row, base in zip(rows, bases, strict=True)]
    top = max(2.0, *ratios) + 0.15 if has_peer else 1.15
    axis.bar([str(row["batch"]) for row in rows], ratios, color="#3b6fb6" if has_peer else "#6b8f3b", width=0.62)
    for i, (row, base) in enumerate(zip(rows, bases, strict=True)):
        axis.text(i, ratios[i] + 0.02, short(row["tok_s"]), ha="center", fontsize=7)
        if has_peer and row.get("floor", math.inf) / base < top:
            axis.plot([i - 0.31, i + 0.31], [row["floor"] / base] * 2, color="#b6523b", linewidth=1.2)
    axis.axhline(1, color="#444", linewidth=0.9, linestyle="--")
    title = entry["name"].replace(", ", "\n").replace(" + ", "\n+ ")
    axis.set_title(title if has_peer else f"{title},\nof its floor", fontsize=9)
    axis.set_xlabel("batch", fontsize=8.5)
    axis.set_ylim(0, top)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    spec = json.loads((ROOT / "bench/results/spec_cpu.json").read_text())
    picture, _ = plot_spec(spec["results"], ROOT / "docs/spec_cpu", spec["model"])
    picture.unlink()  # the pages show the drawings

    report = json.loads((ROOT / "bench/results/h200.json").read_text())
    series = report["series"]
    series.sort(key=lambda entry: not all("peer" in row for row in entry["rows"]))  # those without a peer last
    figure, grid = plt.subplots(-(-len(series) // COLUMNS), COLUMNS, figsize=(10.4, 8.4))
    axes = grid.flatten()
    for axis, entry in zip(axes, series, strict=False):
        draw(axis, entry)
    for axis in axes[len(series) :]:
        axis.set_axis_off()
    has_floor = any("peer" in row and "floor" in row for entry in series for row in entry["rows"])
    label = "speed relative to vLLM 0.26 (dashed)" + ("; floor in red" if has_floor else "")
    axes[0].set_ylabel(label, fontsize=8.5)
    figure.suptitle(f"Output tokens per second, 128 in, 256 out, {report['card']}, {report['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/h200.svg", dpi=130)
    print("docs/h200.svg, docs/spec_cpu.svg")


if __name__ == "__main__":
    main()
