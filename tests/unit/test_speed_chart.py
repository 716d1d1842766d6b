"""The chart of the README is what its script draws of the measured figures, and the README's table has the same."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = json.loads((ROOT / "bench/results/beside_vllm.json").read_text())


def test_the_chart_is_up_to_date() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/draw_speed.py"))["chart"](REPORT)
    assert (ROOT / "docs/speed.svg").read_text() == drawn, "python docs/draw_speed.py draws it anew"


def test_the_picture_is_up_to_date() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/draw_step.py"))["picture"]()
    assert (ROOT / "docs/step.svg").read_text() == drawn, "python docs/draw_step.py draws it anew"


def test_a_bar_is_the_mean_of_ratios() -> None:
    script = runpy.run_path(str(ROOT / "docs/draw_speed.py"))
    assert script["ratios"]({"1x1x1": [10, 5], "2x2x2": [32, 4]}) == [2, 8]
    assert script["mean"]([2, 8]) == pytest.approx(4)


def test_the_readme_has_these_figures() -> None:
    text = (ROOT / "README.md").read_text()
    pair = r"(\d+) / (\d+) \|"
    rows = re.findall(rf"^\| [^|]+ \| {pair} {pair} {pair} (\d+) / (\d+) s \|$", text, re.M)
    shown = sorted([int(part) for part in row] for row in rows)
    cases = ("7x1024x192", "80x300x300", "220x128x128")
    assert shown == sorted([*(speed for case in cases for speed in found[case]), *REPORT["start_s"][name]]
                           for name, found in REPORT["models"].items())
