"""Draws docs/step.svg, the README's picture: one step with three drafts, of which two are accepted.

    python docs/draw_step.py             tests/unit/test_speed_chart.py compares the file
"""

from __future__ import annotations

from pathlib import Path

INK, GREY, KNOWN, DRAFT, GOOD, BAD = "#222", "#667", "#eef3fb", "#fff6e3", "#dff3e4", "#fbe3e3"
WIDTH, HEIGHT, CELL, ROW, LEFT, TOP = 860, 252, 84, 58, 262, 18


def cell(column: int, row: int, word: str, fill: str, note: str = "") -> str:
    x, y = LEFT + column * (CELL + 6), TOP + row * ROW
    return (f'<rect x="{x}" y="{y}" width="{CELL}" height="34" rx="6" fill="{fill}" stroke="#8a94a6"/>'
            f'<text x="{x + CELL / 2}" y="{y + 22}" text-anchor="middle">{word}</text>'
            + (f'<text x="{x + CELL / 2}" y="{y + 48}" text-anchor="middle" font-size="11" fill="{GREY}">{note}</text>'
               if note else ""))


def label(row: int, title: str, words: str) -> str:
    y = TOP + row * ROW
    return (f'<text x="16" y="{y + 15}" font-weight="600">{title}</text>'
            f'<text x="16" y="{y + 32}" font-size="12" fill="{GREY}">{words}</text>')


def picture() -> str:
    known, drafts, picks = ["The", "tide", "is"], ["the", "rise", "of"], ["the", "rise", "and"]
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    parts.append(label(0, "Known tokens", "the prompt, and what came so far"))
    parts += [cell(i, 0, word, KNOWN) for i, word in enumerate(known)]
    parts.append(label(1, "The drafter guesses", "small and fast"))
    parts += [cell(3 + i, 1, word, DRAFT) for i, word in enumerate(drafts)]
    parts.append(label(2, "The model checks", "all guesses in one pass"))
    notes = ("accepted", "accepted", "its own pick")
    parts += [cell(3 + i, 2, word, fill, note)
              for i, (word, fill, note) in enumerate(zip(picks, (GOOD, GOOD, BAD), notes, strict=True))]
    parts.append(label(3, "One step, three tokens", "the same three as without drafts"))
    parts += [cell(i, 3, word, KNOWN) for i, word in enumerate([*known, *picks])]
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">'
            "<title>A drafter guesses three tokens; the model checks them in one pass and accepts two</title>")
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "step.svg").write_text(picture())
