"""The plots of `outrider bench spec`: speed-up by batch size, and acceptance by position. For many prompt sets at one
batch size, they are bars of speed-up and mean run. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.core.plot_files import save_plot

MANY_SETS = 5  # more lines than that cannot be told apart


def plot_spec(cells: list[dict[str, Any]], name: Path, model: str) -> list[Path]:
    """Write the plot as name.png and name.svg. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({cell["batch"] for cell in cells})
    if len(batches) == 1 and len(cells) >= MANY_SETS:
        return save_plot(_bars(pyplot, cells, model), name)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for prompts in dict.fromkeys(cell["prompts"] for cell in cells):
        own = [cell for cell in cells if cell["prompts"] == prompts]
        left.plot([cell["batch"] for cell in own], [cell["ratio"] for cell in own], marker="o", label=prompts)
        for cell in own:
            rates = cell["acceptance_per_position"]
            right.plot(range(1, len(rates) + 1), rates, marker="o", label=f"{prompts}, batch {cell['batch']}")
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(title=f"{model}: speculation against plain", xlabel="requests at once", ylabel="speed-up", xscale="log")
    left.set_xticks(batches, [str(batch) for batch in batches])
    left.minorticks_off()
    left.set_ylim(bottom=0)
    right.set(title="acceptance by position", xlabel="position in the draft", ylabel="accepted", ylim=(0, 1.05))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return save_plot(figure, name)


def _bars(pyplot: Any, cells: list[dict[str, Any]], model: str) -> Any:
    """Draw bars of the speed-up and mean run of each prompt set, with the first set at the top."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 1 + 0.3 * len(cells)), layout="constrained", sharey=True)
    names = [cell["prompts"] for cell in cells]
    for axes, key, words in ((left, "ratio", "speed-up"), (right, "mean_run", "mean run, tokens")):
        bars = axes.barh(names, [cell[key] for cell in cells])
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.axvline(1.0, color="grey", linewidth=0.8)
        axes.set(xlabel=words)
        axes.margins(x=0.12)
        axes.grid(alpha=0.3, axis="x")
    left.invert_yaxis()
    left.set(title=f"{model}: speculation against plain, batch {cells[0]['batch']}")
    return figure
