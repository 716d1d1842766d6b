"""Writes the files of a plot: a picture (PNG) and vector graphics (SVG). Needs matplotlib, which draws the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_plot(figure: Any, name: Path) -> list[Path]:
    """Write name.png and name.svg, and close matplotlib's figure. Returns their paths."""
    from matplotlib import pyplot

    name.parent.mkdir(parents=True, exist_ok=True)
    paths = [name.with_name(name.name + suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths
