"""Draws bench/results/h200.json as docs/h200.svg and docs/h200.png: tokens per second beside the peer's, by batch.

    python bench/plot_results.py

Needs the plot extra. The figures come from `outrider bench throughput`; see docs/log.md for the commands.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    report = json.loads((ROOT / "bench/results/h200.json").read_text())
    series = report["series"]
    figure, grid = plt.subplots(2, -(-len(series) // 2), figsize=(9.6, 6.0))
    axes = grid.flatten()
    for axis, entry in zip(axes, series, strict=True):
        batches = [row["batch"] for row in entry["rows"]]
        ratios = [row["tok_s"] / row["peer"] for row in entry["rows"]]
        axis.bar([str(b) for b in batches], ratios, color="#3b6fb6", width=0.62)
        for i, row in enumerate(entry["rows"]):
            axis.text(i, ratios[i] + 0.02, f"{row['tok_s']:,.0f}", ha="center", fontsize=7.5)
        axis.axhline(1, color="#444", linewidth=0.9, linestyle="--")
        axis.set_title(entry["name"], fontsize=9.5)
        axis.set_xlabel("batch", fontsize=8.5)
        axis.set_ylim(0, max(2.0, *ratios) + 0.15)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("speed relative to vLLM 0.26 (dashed)", fontsize=8.5)
    figure.suptitle(f"Output tokens per second, 128 in, 256 out, {report['card']}, {report['date']}", fontsize=10)
    figure.tight_layout()
    for suffix in ("svg", "png"):
        figure.savefig(ROOT / f"docs/h200.{suffix}", dpi=130)
    print("docs/h200.svg, docs/h200.png")


if __name__ == "__main__":
    main()
