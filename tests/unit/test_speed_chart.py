"""The chart of the README is what its script draws of the measured figures."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = json.loads((ROOT / "bench/results/h200.json").read_text())


def test_the_chart_is_up_to_date() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/draw_speed.py"))["chart"](REPORT)
    assert (ROOT / "docs/speed.svg").read_text() == drawn, "python docs/draw_speed.py draws it anew"


def test_with_drafts_the_peer_counts_with_its_faster_way() -> None:
    def series(name: str, speed: float, peer: float) -> dict[str, object]:
        return {"name": name, "rows": [{"tok_s": speed, "peer": peer}, {"tok_s": 4 * speed, "peer": peer}]}

    ratios = runpy.run_path(str(ROOT / "docs/draw_speed.py"))["ratios"]
    report = {"series": [series("a", 10, 5), series("a + MTP", 20, 4)]}
    assert ratios(report, "a", None).values == [2, 8]
    drafted = ratios(report, "a", "a + MTP")
    assert drafted.values == [4, 16] and drafted.mean == pytest.approx(8)
