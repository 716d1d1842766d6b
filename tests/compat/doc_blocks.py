"""The code blocks of README.md and docs/, and what each is: commands, Python, or neither."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (r"outrider|pip|pipx|uv|uvx|python3?|bash|sh|curl|make|podman|docker|kubectl|helm|git|install|systemctl|ray|"
            r"serve run|[A-Z_]+=\S+")
COMMAND = re.compile(rf"(?:\$ )?(?:sudo )?(?:{PROGRAMS})(?: (?!=)|$)")


@dataclass(frozen=True)
class Block:
    page: str  # "docs/guide.md"
    line: int
    heading: str  # the nearest one above
    text: str

    @property
    def commands(self) -> list[str]:
        """Command lines without their comments, continued lines and those inside quotes joined."""
        return self._parts[0]

    @property
    def rest(self) -> str:
        """What is not a command."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[list[str], str]:
        commands: list[str] = []
        rest: list[str] = []
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        while lines:
            line = lines.pop(0)
            if not COMMAND.match(line):
                rest.append(line)
                continue
            command = _without_comment(line)
            while command.count("'") % 2 and lines:
                command = f"{command} {_without_comment(lines.pop(0))}"
            commands.append(command)
        return commands, "\n".join(rest)

    @property
    def is_python(self) -> bool:
        return not self.commands and compiles(self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _without_comment(line: str) -> str:
    return re.split(r"\s{2,}#", line)[0].strip()


def compiles(text: str) -> bool:
    try:
        compile(text, "a block", "exec")
    except SyntaxError:
        return False
    return True


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
