"""Draws docs/speed.svg, the chart of the README: speed over vLLM's on the same card, by model.

    python docs/draw_speed.py            tests/unit/test_speed_chart.py compares the file

The figures are those of bench/results/beside_vllm.json, which docs/benchmarks.md has as a table. A bar is the geometric
mean of a model's ratios, one for each case; its line goes from the least to the greatest of them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Models of the results, with what kind of model each is.
MODELS = [
    ("qwen06b", ["Qwen3 0.6B", "dense"]),
    ("llama8b", ["Llama 8B", "dense"]),
    ("llama8b + EAGLE-3", ["Llama 8B", "+ EAGLE-3"]),
    ("gemma4-4b + assistant", ["Gemma 4 4B", "+ assistant"]),
    ("nemotronh-15b-a2b + MTP", ["NemotronH 15B", "Mamba-2, + MTP"]),
    ("dsv32-8b-a2b + MTP", ["DeepSeek-V3.2 8B", "sparse, + MTP"]),
]
PLAIN, DRAFTED, INK = "#7a93b5", "#2f6db5", "#222"
WIDTH, HEIGHT, LEFT, BASE, UNIT = 860, 312, 46, 246, 51  # UNIT: pixels of a ratio of 1
BAR = 64


def ratios(cases: dict[str, list[float]]) -> list[float]:
    return [ours / peer for ours, peer in cases.values()]


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def text(x: float, y: float, shown: str, style: str = ' text-anchor="middle"') -> str:
    return f'<text x="{x}" y="{y}"{style}>{shown}</text>'


def bar(x: float, values: list[float], fill: str) -> list[str]:
    height, middle = UNIT * mean(values), x + BAR / 2
    least, most = (BASE - UNIT * end(values) for end in (min, max))
    return [
        f'<rect x="{x}" y="{BASE - height:.1f}" width="{BAR}" height="{height:.1f}" rx="3" fill="{fill}"/>',
        f'<line x1="{middle}" y1="{least:.1f}" x2="{middle}" y2="{most:.1f}" stroke="{INK}" stroke-opacity="0.5"/>',
        text(middle, BASE - 8, f"{mean(values):.2f}x", ' text-anchor="middle" font-weight="600" fill="#fff"'),
    ]


def chart(report: dict[str, Any]) -> str:
    step = (WIDTH - LEFT - 10) // len(MODELS)
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for ratio in (1, 2, 3, 4):
        y = BASE - UNIT * ratio
        dash = ' stroke-dasharray="5 4"' if ratio == 1 else ' stroke-opacity="0.15"'
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 10}" y2="{y}" stroke="{INK}"{dash}/>')
        parts.append(text(LEFT - 8, y + 4, "vLLM" if ratio == 1 else f"{ratio}x", ' text-anchor="end"'))
    for i, (name, kind) in enumerate(MODELS):
        x = LEFT + i * step + (step - BAR) / 2
        parts += bar(x, ratios(report["models"][name]), DRAFTED if "+" in name else PLAIN)
        parts += [text(x + BAR / 2, BASE + 18 + 16 * line, words) for line, words in enumerate(kind)]
    for x, fill, words in [(LEFT, PLAIN, "without drafts"), (LEFT + 140, DRAFTED, "both engines with drafts")]:
        parts.append(f'<rect x="{x}" y="{HEIGHT - 20}" width="12" height="12" fill="{fill}"/>')
        parts.append(text(x + 18, HEIGHT - 10, words, ""))
    legend = "bar: geometric mean of the cases; line: least to greatest"
    parts.append(text(WIDTH - 10, HEIGHT - 10, legend, ' text-anchor="end"'))
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12.5" fill="#222">'
            f'<title>Output tokens per second relative to {report["peer"]} on an {report["card"]}</title>')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def main() -> None:
    report = json.loads((ROOT / "bench/results/beside_vllm.json").read_text())
    (ROOT / "docs/speed.svg").write_text(chart(report))


if __name__ == "__main__":
    main()
