"""Gathers what bench/h200.sh left in a folder, beside the peer's figures, in bench/results/h200.json, which is plotted.

    python bench/collect_results.py OUT

A result that is missing in OUT keeps what h200.json had of it before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLES = {
    "qwen06b": "qwen06b", "llama8b": "llama8b", "llama8b-eagle3": "llama8b + EAGLE-3", "gemma4-4b": "gemma4-4b",
    "gemma4-4b-assistant": "gemma4-4b + assistant", "nemotronh": "nemotronh-15b-a2b",
    "nemotronh-mtp": "nemotronh-15b-a2b + MTP", "nemotronh-spread": "nemotronh-15b-a2b, spread routing",
    "nemotronh-mtp-spread": "nemotronh-15b-a2b + MTP, spread routing",
    "dsv32": "dsv32-8b-a2b", "dsv32-mtp": "dsv32-8b-a2b + MTP", "dsv32-spread": "dsv32-8b-a2b, spread routing",
    "dsv32-mtp-spread": "dsv32-8b-a2b + MTP, spread routing",
}
KEPT = ("mean_run", "distinct_experts")
START = "from making the engine to its first token, kernels compiled anew; process_s: from the start of the process"
DRAFTS = "up to 3 drafts, synthetic acceptance of 2.5, number of drafts chosen every step"
SPREAD = ("expert ids from a hash of layer, token row and step, while the router still runs; the peer's random weights "
          "send all tokens to six experts")


def series_of(name: str, result: dict[str, Any], peer: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the series by batch, other cases)"""
    rows, others = [], []
    for case in result["results"]:
        batch, *lengths = case["case"].split("x")
        row = {"tok_s": case["out_tok_s"], "floor": case["floor_tok_s"]}
        if lengths == ["128", "256"]:
            row |= {"batch": int(batch)} | {key: case[key] for key in KEPT if key in case}
            if name in peer["tok_s"]:
                row["peer"] = peer["tok_s"][name][peer["batches"].index(int(batch))]
            rows.append(row)
        else:
            row |= {"model": name, "case": case["case"], "peer": peer["others"].get(name, {}).get(case["case"])}
            others.append(row)
    notes = [DRAFTS] * bool(result["speculative_config"]) + [SPREAD] * (result["routing"] == "spread")
    series = {"name": TITLES[name], "date": result["date"], "start_s": result["start_s"],
              "process_s": result["process_s"]} | ({"note": "; ".join(notes)} if notes else {})
    return series | {"rows": rows}, others


def main(folder: Path) -> None:
    peer = json.loads((RESULTS / "peer.json").read_text())
    report = json.loads((RESULTS / "h200.json").read_text())
    series = {entry["name"]: entry for entry in report["series"]}
    others = {(entry["model"], entry["case"]): entry for entry in report["others"]}
    for name, title in TITLES.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        report |= {"date": result["date"], "card": result["card"], "versions": result["versions"], "start_s": START}
        series[title], more = series_of(name, result, peer)
        others |= {(entry["model"], entry["case"]): entry for entry in more}
    report["series"] = [series[title] for title in TITLES.values() if title in series]
    report["others"] = list(others.values())
    (RESULTS / "h200.json").write_text(pretty(report))


def pretty(report: dict[str, Any]) -> str:
    """A line for every row of a series."""
    head = {key: value for key, value in report.items() if key not in ("series", "others")}
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "series": [']
    for entry in report["series"]:
        rows = ",\n".join(f"    {json.dumps(row)}" for row in entry["rows"])
        fields = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items() if key != "rows")
        lines.append(f'  {{{fields}, "rows": [\n{rows}]}}{"" if entry is report["series"][-1] else ","}')
    others = ",\n".join(f"  {json.dumps(entry)}" for entry in report["others"])
    return "\n".join(lines) + f'\n ],\n "others": [\n{others}]\n}}\n'


if __name__ == "__main__":
    main(Path(sys.argv[1]))
