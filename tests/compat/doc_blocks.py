"""The code blocks of README.md and docs/, and what each is: commands, Python, or neither."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("outrider ", "pip ", "python ", "bash ", "curl ", "make ", "podman ", "python3 ", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Block:
    page: str  # "docs/guide.md"
    line: int
    heading: str  # the nearest one above
    text: str

    @property
    def commands(self) -> list[str]:
        """Command lines without their comments, continued lines joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        shown = [re.split(r"\s{2,}#", line)[0].strip() for line in lines]
        return [line for line in shown if line.startswith(COMMANDS) or line == "outrider"]

    @property
    def is_python(self) -> bool:
        if self.commands:
            return False
        try:
            compile(self.text, self.page, "exec")
        except SyntaxError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and blocks that are indented by four spaces after an empty line."""
    heading, held, start, fence = "", [], 0, False
    lines = page.read_text().splitlines()
    name = str(page.relative_to(ROOT))
    for number, line in enumerate([*lines, "end"], 1):
        if line.startswith("```"):
            if fence:
                yield Block(name, start, heading, "\n".join(held) + "\n")
            held, start, fence = [], number + 1, not fence
            continue
        is_code = fence or line.startswith("    ") and (held or not lines[number - 2].strip())
        if is_code or held and not line.strip():
            held, start = [*held, line], start if held else number
        elif held:
            yield Block(name, start, heading, textwrap.dedent("\n".join(held)).rstrip() + "\n")
            held = []
        if not fence and line.startswith("#"):
            heading = line.lstrip("# ")


def all_blocks() -> list[Block]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [block for page in pages for block in blocks(page)]
