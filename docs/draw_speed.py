"""Draws docs/speed.svg, the chart of the README: speed over vLLM's, by kind of model, without and with drafts.

    python docs/draw_speed.py            tests/unit/test_speed_chart.py compares the file

The figures are those of bench/results/h200.json, which docs/benchmarks.md has as a table. A bar is the geometric mean
of the ratios at 1, 8, 64 and 256 requests; its line goes from the least to the greatest of them. With drafts vLLM
counts with drafts or without them, whichever is faster there, since its user would choose that.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Models of the results and of their drafters, with what kind of model each is.
MODELS = [
    ("qwen06b", None, ["dense", "0.6B"]),
    ("llama8b", "llama8b + EAGLE-3", ["dense", "8B"]),
    ("gemma4-4b", "gemma4-4b + assistant", ["sliding window", "4B"]),
    ("nemotronh-15b-a2b", "nemotronh-15b-a2b + MTP", ["Mamba-2 hybrid", "MoE 15B"]),
    ("dsv32-8b-a2b", "dsv32-8b-a2b + MTP", ["sparse attention", "MoE 8B"]),
]
PLAIN, DRAFTED, INK = "#7a93b5", "#2f6db5", "#222"
WIDTH, HEIGHT, LEFT, BASE, UNIT = 860, 312, 46, 236, 66  # UNIT: pixels of a ratio of 1
BAR = 46


@dataclass(frozen=True)
class Ratios:
    values: list[float]  # by batch

    @property
    def mean(self) -> float:
        return math.exp(sum(map(math.log, self.values)) / len(self.values))


def ratios(report: dict[str, Any], plain: str, drafted: str | None) -> Ratios:
    """The ratios of a model with a drafter, or without one if `drafted` is None."""
    rows = {series["name"]: series["rows"] for series in report["series"]}
    ours = rows[drafted or plain]
    peers = [max(row["peer"], own["peer"]) for row, own in zip(rows[plain], ours, strict=True)]
    return Ratios([row["tok_s"] / peer for row, peer in zip(ours, peers, strict=True)])


def text(x: float, y: float, shown: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{style}>{shown}</text>'


def bar(x: int, shown: Ratios, fill: str) -> list[str]:
    top, middle = BASE - UNIT * shown.mean, x + BAR / 2
    least, most = (BASE - UNIT * end(shown.values) for end in (min, max))
    return [
        f'<rect x="{x}" y="{top:.1f}" width="{BAR}" height="{UNIT * shown.mean:.1f}" fill="{fill}"/>',
        f'<line x1="{middle}" y1="{least:.1f}" x2="{middle}" y2="{most:.1f}" stroke="{INK}" stroke-opacity="0.5"/>',
        text(middle, BASE - 8, f"{shown.mean:.1f}x", style=' font-weight="600" fill="#fff"'),
    ]


def chart(report: dict[str, Any]) -> str:
    step = (WIDTH - LEFT - 10) // len(MODELS)
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for ratio in (1, 2, 3):
        y = BASE - UNIT * ratio
        dash = ' stroke-dasharray="5 4"' if ratio == 1 else ' stroke-opacity="0.15"'
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 10}" y2="{y}" stroke="{INK}"{dash}/>')
        parts.append(text(LEFT - 8, y + 4, "vLLM" if ratio == 1 else f"{ratio}x", "end"))
    for i, (plain, drafted, kind) in enumerate(MODELS):
        x = LEFT + i * step + (step - 2 * BAR - 6) // 2
        parts += bar(x if drafted else x + BAR // 2, ratios(report, plain, None), PLAIN)
        if drafted:
            parts += bar(x + BAR + 6, ratios(report, plain, drafted), DRAFTED)
        parts += [text(x + BAR + 3, BASE + 18 + 16 * line, words) for line, words in enumerate(kind)]
    key = [(LEFT, PLAIN, "without drafts"), (LEFT + 140, DRAFTED, "with drafts (vLLM with or without, the faster)")]
    for x, fill, words in key:
        parts.append(f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" fill="{fill}"/>')
        parts.append(text(x + 18, HEIGHT - 12, words, "start"))
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12.5" fill="#222">'
            f'<title>Output tokens per second relative to vLLM 0.26 on an {report["card"]}</title>')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def main() -> None:
    report = json.loads((ROOT / "bench/results/h200.json").read_text())
    (ROOT / "docs/speed.svg").write_text(chart(report))


if __name__ == "__main__":
    main()
