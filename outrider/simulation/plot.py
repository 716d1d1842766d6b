"""The plot of `outrider simulate`: throughput and latencies over the load, or over the number of replicas. Needs
matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.core.plot_files import save_plot


def plot_capacity(rows: list[dict[str, Any]], name: Path, title: str) -> list[Path]:
    """Write name.png and name.svg: one line for each number of replicas, over the load. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    axis = "load" if len({row["load"] for row in rows}) > 1 else "replicas"
    lines = "replicas" if axis == "load" else "load"
    for value in dict.fromkeys(row[lines] for row in rows):
        own = [row for row in rows if row[lines] == value]
        at, label = [row[axis] for row in own], f"{lines} {value:g}"
        left.plot(at, [row["output_throughput"] for row in own], marker="o", label=label)
        for percent, style in ((50, "--"), (99, "-")):
            right.plot(at, [row[f"p{percent}_ttft_ms"] for row in own], style, marker="o", label=f"{label}, p{percent}")
    left.set(title=title, xlabel=axis, ylabel="output tokens per second")
    right.set(title="time to the first token", xlabel=axis, ylabel="ms", yscale="log")
    for axes in (left, right):
        if min(row[axis] for row in rows) > 0 and max(row[axis] for row in rows) > 16 * min(row[axis] for row in rows):
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return save_plot(figure, name)
