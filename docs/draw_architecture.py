"""Draws docs/architecture.svg: the parts of the engine and what passes between them."""

# ruff: noqa: E501

from pathlib import Path

HOST, DEVICE, DATA, TEXT = "#eef3fb", "#eaf6ee", "#fff6e3", "#222"
parts: list[str] = []


def box(x: int, y: int, w: int, h: int, title: str, lines: list[str], fill: str) -> None:
    parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="#8a94a6"/>')
    parts.append(f'<text x="{x + 12}" y="{y + 22}" font-weight="600">{title}</text>')
    for i, line in enumerate(lines):
        parts.append(f'<text x="{x + 12}" y="{y + 42 + 17 * i}" font-size="12.5" fill="#444">{line}</text>')


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "", dx: int = 6, dy: int = -5) -> None:
    parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#445" stroke-width="1.4" marker-end="url(#a)"/>')
    if label:
        parts.append(f'<text x="{(x1 + x2) // 2 + dx}" y="{(y1 + y2) // 2 + dy}" font-size="12" fill="#445">{label}</text>')


box(30, 20, 920, 62, "llm.py, cli.py, engine/async_llm.py", ["prompts in; growing RequestOutputs out"], HOST)
box(30, 112, 920, 92, "engine/: the loop", [
    "batch = scheduler.schedule()   ->   future = runner.submit(batch)   ->   updates = scheduler.update(result)   ->   emit(runs)",
    "one step is scheduled before the last one's result is read; text, stop strings and log-probabilities take runs of tokens",
], HOST)
box(30, 240, 440, 190, "sched/ and cache/: numbers only, no torch", [
    "Scheduler: rows, settled and bound lengths, epochs, priorities",
    "DraftCounts: measured costs + acceptance -> k per request",
    "CacheManager: pages per request and group",
    "  allocated by bound, dropped and published by settled",
    "PagePool: blank | cached | owned, LRU    PageHashes: prefix hits",
    "kinds: full, sliding window, recurrent: capacity, what may be",
    "  dropped, what serves a prefix; one function for each number",
], HOST)
box(510, 240, 440, 400, "runner/: one step on the device, no host reads", [
    "RowState: tokens, known, computed, drafts, page tables",
    "  by row; the truth about every length",
    "inputs: ForwardBatch with padded, scheduled, live counts",
], DEVICE)
box(530, 326, 400, 58, "forward: models/ and layers/", ["attend(layer, q, k, v) -> attention/ backend: torch, cpu, triton"], "#fff")
box(530, 392, 400, 58, "finish: sample/", ["one sampler for k + 1 rows; accept while draft == sampled"], "#fff")
box(530, 458, 400, 58, "commit", ["the run becomes known, accepted drafts computed"], "#fff")
box(530, 524, 400, 100, "draft: spec/", [
    "n-gram, draft model, EAGLE, MTP, Gemma assistant: the same",
    "batch, their layers in the same pages; never change the text",
    "captured: the whole step is one graph per padded size",
], "#fff")
box(30, 470, 440, 78, "kernels/", [
    "reference.py is the specification; native.c on the CPU,",
    "triton/ on CUDA; callers never see a launch grid",
], DATA)
box(30, 564, 440, 76, "cache/pool.py: device memory", [
    "equal pages; a page's bytes are contiguous over its group's layers",
], DATA)
arrow(250, 82, 250, 110)
arrow(250, 204, 250, 238)
arrow(730, 204, 730, 238, "ScheduledBatch", 8, 2)
arrow(660, 238, 660, 206, "StepResult", -78, 2)
arrow(510, 505, 472, 505)
arrow(510, 600, 472, 600)
Path(__file__).with_name("architecture.svg").write_text(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 980 660" font-family="Inter, Helvetica, Arial, sans-serif" '
    f'font-size="14.5" fill="{TEXT}"><defs><marker id="a" markerWidth="9" markerHeight="9" refX="8" refY="4.5" '
    'orient="auto"><path d="M0,0 L9,4.5 L0,9 z" fill="#445"/></marker></defs>'
    '<rect width="980" height="660" fill="white"/>' + "".join(parts) + "</svg>\n"
)
