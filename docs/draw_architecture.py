"""Draws docs/architecture.svg: the parts of the engine and the data that pass between them."""

# ruff: noqa: E501

from pathlib import Path

HOST, DEVICE, DATA, TEXT = "#eef3fb", "#eaf6ee", "#fff6e3", "#222"
parts: list[str] = []


def box(x: int, y: int, w: int, h: int, title: str, lines: list[str], fill: str) -> None:
    parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="#8a94a6"/>')
    parts.append(f'<text x="{x + 12}" y="{y + 22}" font-weight="600">{title}</text>')
    for i, line in enumerate(lines):
        parts.append(f'<text x="{x + 12}" y="{y + 42 + 17 * i}" font-size="11.5" fill="#444">{line}</text>')


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "", dx: int = 6, dy: int = -5) -> None:
    parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#445" stroke-width="1.4" marker-end="url(#a)"/>')
    if label:
        parts.append(f'<text x="{(x1 + x2) // 2 + dx}" y="{(y1 + y2) // 2 + dy}" font-size="12" fill="#445">{label}</text>')


box(30, 20, 920, 62, "llm.py, async_llm.py, server/, cli.py, commands/ and benchmarks/", ["prompts go in; outputs grow by OutputIncrements. All layers import core/ (plain data that crosses boundaries) and config.py (settings)"], HOST)
box(30, 112, 920, 104, "engine/: the loop, without torch", [
    "batch = scheduler.schedule();   result = runner.submit(batch);   scheduler.update(result);   emit(result)",
    "A step is scheduled before the result of the step before it is read. Runs of tokens become text; stop strings end requests.",
    "request_checks.py refuses what cannot be served; grammar/ compiles structured outputs; features/ add theirs",
], HOST)
box(30, 240, 440, 190, "sched/, speculation/, cache/: numbers only, no torch", [
    "Scheduler: rows, settled and bound lengths, epochs, waiting requests",
    "DraftCounts: measured costs + acceptance -&gt; drafts per request",
    "CacheManager: pages per request and group, allocated by",
    "  bound length, dropped and published by settled length",
    "PagePool: blank | cached | owned, LRU    PageHashes: prefix hits",
    "cache/kinds/: full, sliding, latent, recurrent; each answers how",
    "  many pages, which may be dropped, which serve a prefix",
], HOST)
box(510, 240, 440, 400, "runner/: the worker runs a step on the device", [
    "RowState: known tokens, drafts, page tables by row; no host reads",
    "batch.py: ForwardBatch with padded, scheduled, live counts",
    "graphs/: the whole step is one captured graph per padded size",
], DEVICE)
box(530, 326, 400, 86, "forward: models/ and layers/", [
    "formats/ own weights and products (dense, GGUF)",
    "mixers/ use the cache: paged (torch, native, triton, flex),",
    "latent, recurrent",
], "#fff")
box(530, 418, 400, 54, "finish: sample/", ["one sampler; drafts are accepted while they equal its tokens"], "#fff")
box(530, 478, 400, 54, "commit: kernels/step.py", ["the run becomes known, accepted drafts become computed"], "#fff")
box(530, 538, 400, 92, "draft: drafters/", [
    "n-gram, draft model, EAGLE, MTP, Gemma assistant, on the same",
    "batch and in the same pages; suffix on the host. A draft cannot",
    "change the text",
], "#fff")
box(30, 452, 440, 100, "kernels/: operations", [
    "kernels/ops is the table: operation -&gt; torch reference (defines it),",
    "native C code (CPU), Triton kernels (CUDA); the table chooses,",
    "and callers never see a launch grid",
], DATA)
box(30, 564, 440, 76, "mixers/pool.py: device memory of all pages", [
    "equal pages; a page's bytes are contiguous over its group's layers",
], DATA)
arrow(250, 82, 250, 110)
arrow(250, 216, 250, 238)
arrow(730, 216, 730, 238, "ScheduledBatch", 8, 2)
arrow(660, 238, 660, 218, "StepResult", -78, 2)
arrow(510, 505, 472, 505)
arrow(510, 600, 472, 600)
Path(__file__).with_name("architecture.svg").write_text(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 980 660" font-family="Inter, Helvetica, Arial, sans-serif" '
    f'font-size="14.5" fill="{TEXT}"><defs><marker id="a" markerWidth="9" markerHeight="9" refX="8" refY="4.5" '
    'orient="auto"><path d="M0,0 L9,4.5 L0,9 z" fill="#445"/></marker></defs>'
    '<rect width="980" height="660" fill="white"/>' + "".join(parts) + "</svg>\n"
)
