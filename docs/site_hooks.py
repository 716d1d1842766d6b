"""Pages of the site that are made from other files: the README as its first page, the examples, the help of every
command, and the project's own papers. mkdocs.yml names this file; mkdocs calls the functions that begin with `on_`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from outrider.commands.help import ALL, help_text

ROOT = Path(__file__).parent.parent
# Files outside docs/ that have a page of their own, by the name of that page.
PAPERS = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md",
          "security.md": "SECURITY.md"}
PAGES = {source: page for page, source in PAPERS.items()} | {"examples": "examples.md"}


def on_files(files: Files, config: Any) -> Files:
    made = {page: (ROOT / source).read_text() for page, source in PAPERS.items()}
    made |= {"examples.md": examples(), "commands.md": commands()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages. The first page has all of the width."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["toc"]
    return re.sub(r"\]\(([^()\s]+)\)", lambda link: f"]({page_of(link[1])})", markdown)


def page_of(target: str) -> str:
    """The page of a link that is written as the repository's files lie, from the root, from docs/ or from examples/."""
    if re.match(r"\w+:|#", target):
        return target
    path, mark, anchor = target.partition("#")
    path = path.removeprefix("../").removeprefix("docs/").removesuffix("/")
    if path in PAGES:
        return f"{PAGES[path]}{mark}{anchor}"
    script = path.removeprefix("examples/")
    if (ROOT / "examples" / script).is_file() and script.endswith(".py"):
        return f"examples.md#{script.replace('.', '')}"
    return f"{path}{mark}{anchor}"


def examples() -> str:
    """The list of the examples, and each of them whole."""
    folder = ROOT / "examples"
    parts = [(folder / "README.md").read_text()]
    for path in sorted(folder.glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text().rstrip()}\n```\n")
    return "\n".join(parts)


def commands() -> str:
    """Every command with all its flags, as its own help prints them."""
    from outrider.cli import build_parser

    os.environ["COLUMNS"] = "110"
    parts = ["# Commands\n\nWhat `outrider COMMAND --help=all` prints.\n"]
    for name, parser in command_parsers(build_parser()):
        parts.append(f"## {name}\n\n```text\n{help_text(parser, ALL).rstrip()}\n```\n")
    return "\n".join(parts)


def command_parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands and what is below them (`outrider bench spec`), each with its full name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                nested = list(command_parsers(below))
                yield from nested or [(below.prog, below)]
