"""Every command and every piece of Python in README.md and docs/ is run by a test, or says why not.

`doc_commands.py` has every command with the way it is tried; RUN_BY says for each heading which test runs the Python
under it. Flags of every command and imports of every piece of Python are checked here, those for a GPU too.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import build_parser
from outrider.commands.parser import check_flags
from outrider.models import registry
from outrider.models.llama import Llama
from tests.compat.doc_blocks import ROOT, Block, all_blocks, compiles
from tests.compat.doc_commands import ALONE, NOT_RUN, SERVERS, printed, ways

BLOCKS = all_blocks()
OTHERS_FLAGS = {"--build-arg", "--gpus", "--stop-timeout"}  # of docker, in the text
NO_CODE = "a diagram, a form, or lines of a file"
HERE = "tests/compat/test_docs.py"
EXTENDING = "tests/unit/test_extending.py"
# Blocks that are no commands: which test runs them, and how many there are under the heading, if there are several.
RUN_BY: dict[tuple[str, str], str | tuple[str, int]] = {
    ("README.md", "Use it"): "tests/compat/test_readme.py",
    ("docs/architecture.md", "How Outrider works"): NO_CODE,
    ("docs/architecture.md", "Two lengths"): NO_CODE,
    ("docs/architecture.md", "The way of a page"): NO_CODE,
    ("docs/architecture.md", "The life of a recurrent state"): NO_CODE,
    ("docs/adapters.md", "Adapters (LoRA)"): "tests/adapters/test_server.py",
    ("docs/deployment.md", "Watching it"): NO_CODE,
    ("docs/drafters.md", "Drafters"): "tests/compat/test_readme.py",
    ("docs/drafters.md", "Writing one"): ("tests/drafters/test_custom.py", 2),
    ("docs/extending.md", "A weight format"): (EXTENDING, 2),
    ("docs/extending.md", "A part of a layer for each rank"): EXTENDING,
    ("docs/extending.md", "A fused layer"): EXTENDING,
    ("docs/extending.md", "A cache kind and its mixer"): ("tests/unit/test_extending_cache.py", 3),
    ("docs/extending.md", "A cache type"): EXTENDING,
    ("docs/extending.md", "A place for cached pages"): "tests/unit/test_extending_tier.py",
    ("docs/extending.md", "A feature"): "tests/unit/test_extending_feature.py",
    ("docs/extending.md", "An attention backend"): EXTENDING,
    ("docs/extending.md", "A mask"): EXTENDING,
    ("docs/extending.md", "A model family"): (HERE, 2),
    ("docs/extending.md", "A method of training"): EXTENDING,
    ("docs/extending.md", "A kernel"): EXTENDING,
    ("docs/extending.md", "A command to the worker"): EXTENDING,
    ("docs/guide.md", "From Python"): HERE,
    ("docs/guide.md", "Scripts written for vLLM"): "tests/compat/test_alias.py",
    ("docs/guide.md", "Logits processors"): "tests/engine/test_logits_processors.py",
    ("docs/guide.md", "Embeddings"): (HERE, 2),
    ("docs/guide.md", "Embeddings in place of token ids"): (HERE, 2),
    ("docs/guide.md", "Prompts that attend in both directions"): "tests/engine/test_spans.py",
    ("docs/guide.md", "Sleeping"): HERE,
    ("docs/guide.md", "Other weights"): HERE,
    ("docs/images.md", "Images"): "tests/images/test_page.py",
    ("docs/images.md", "Prompts"): "tests/images/test_page.py",
    ("docs/replicas.md", "On Ray"): "tests/ray/test_ray_serve.py",
    ("docs/scale.md", "Ranks: one model on several devices of a machine"): "tests/ranks/test_commands.py",
    ("docs/serving.md", "Serving"): "tests/server/test_sdk_clients.py",
    ("docs/serving.md", "Fields beyond OpenAI's"): "tests/server/test_prompt_embeds.py",
    ("docs/serving.md", "Stored responses"): "tests/server/test_stored_responses.py",
    ("docs/serving.md", "Batches without a server"): NO_CODE,
    ("docs/serving.md", "Settings"): "tests/server/test_serve.py",
    ("docs/simulation.md", "The load"): NO_CODE,
    ("docs/structured_output.md", "Structured output"): HERE,
    ("docs/training.md", "What it does"): NO_CODE,
    ("docs/trainers.md", "TRL"): "tests/training/test_trl.py",
    ("docs/trainers.md", "Giving weights"): "tests/training/test_trl.py",
}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a command and of the commands below it."""
    flags = set()
    for action in parser._actions:
        flags.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                flags |= flags_of(command)
    return flags


def test_every_command_is_run_or_says_why_not() -> None:
    listed = ways()
    assert sorted(printed() - listed.keys()) == [], "say in tests/compat/doc_commands.py how these are tried"
    assert sorted(listed.keys() - printed()) == [], "no page prints these"
    entries = [*ALONE, *SERVERS, *(ask for asks in SERVERS.values() for ask in asks),
               *(command for commands in NOT_RUN.values() for command in commands)]
    assert [command for command, times in Counter(entries).items() if times > 1] == []
    assert all((ROOT / reason).is_file() for reason in NOT_RUN if reason.startswith("tests/"))


def test_every_other_block_is_run_somewhere_or_is_no_code() -> None:
    others = Counter((block.page, block.heading) for block in BLOCKS if block.rest.strip())
    expected = {place: 1 if isinstance(by, str) else by[1] for place, by in RUN_BY.items()}
    assert dict(others) == expected, f"say in RUN_BY of {HERE} which test runs a block"
    tests = {by if isinstance(by, str) else by[0] for by in RUN_BY.values()} - {NO_CODE}
    assert all((ROOT / where).is_file() for where in tests)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.commands], ids=str)
def test_beside_commands_a_block_has_only_python(block: Block) -> None:
    assert compiles(block.rest), f"a command that doc_blocks.py does not know? {block.rest}"


def test_a_new_command_is_seen() -> None:
    def commands(text: str) -> list[str]:
        return Block("docs/new.md", 1, "New", text).commands

    assert commands("uv pip install outrider   # new\n") == ["uv pip install outrider"]
    assert commands("A=1 outrider chat  # it's\nx = 1\npip = 3\n") == ["A=1 outrider chat"]
    assert commands("curl u -d '{\n  \"a\": 1}'\nmake x \\\n  y\n") == ["curl u -d '{ \"a\": 1}'", "make x y"]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.commands], ids=str)
def test_flags_of_its_commands_are_understood(block: Block) -> None:
    for command in block.commands:
        if command.startswith("outrider "):
            check_flags(build_parser().parse(shlex.split(command.split(" && ")[0])[1:]))
        elif script := re.search(r"python (bench/\w+\.py)", command):
            assert (ROOT / script[1]).is_file(), command


@pytest.mark.parametrize("block", [block for block in BLOCKS if "import " in block.text], ids=str)
def test_its_imports_are_there(block: Block) -> None:
    for module, names in re.findall(r"^\s*from (outrider[\w.]*) import ([\w, ]+)", block.text, re.M):
        found = importlib.import_module(module)
        assert all(hasattr(found, name.strip()) for name in names.split(",")), f"{module}: {names}"


def test_flags_metrics_and_routes_of_the_text_exist() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    files = [path for folder in ("outrider", "bench") for path in (ROOT / folder).rglob("*.py")]
    sources = "\n".join(path.read_text() for path in files)
    told = set(re.findall(r"`(?:[^`\n]* )?(--[a-z][a-z-]+)", text)) - OTHERS_FLAGS
    known = flags_of(build_parser()) | set(re.findall(r'"(--[a-z][a-z-]+)"', sources))
    assert len(told) > 80 and sorted(told - known) == []
    metrics = {name.removesuffix("_total") for name in re.findall(r"vllm:(\w+)", text) if not name.endswith("_")}
    assert len(metrics) > 12
    assert [name for name in metrics if not re.search(rf"\b{name}(_total)?\b", sources)] == []
    routes = set(re.findall(r"`(?:GET |POST |DELETE )?(/(?:v1/)?[a-z_]+)`", (ROOT / "docs/serving.md").read_text()))
    assert len(routes) > 30 and sorted(route for route in routes if f'"{route}"' not in sources) == []


def code_under(page: str, heading: str) -> list[str]:
    return [block.text for block in BLOCKS if (block.page, block.heading) == (page, heading)]


@pytest.mark.parametrize("page, heading", [("docs/guide.md", "From Python"),
                                           ("docs/structured_output.md", "Structured output")])
def test_programs_run(page: str, heading: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = code_under(page, heading)
    exec(program.replace('"smollm2"', repr(str(model))), {})


def test_pieces_of_the_guide_run(names: dict[str, Any]) -> None:
    """Those that need only an engine, a prompt and weights."""
    import torch

    from outrider import PoolingParams

    given = names | {"PoolingParams": PoolingParams, "ids": list(range(1, 9)), "embeds": torch.zeros(8, 32)}
    exec(code_under("docs/guide.md", "Embeddings")[0], given)
    first, second = code_under("docs/guide.md", "Embeddings in place of token ids")
    exec(first, given)
    exec(second.replace('"prompt_embeds": embeds', '"prompt_embeds": embeds[:4]'), given)
    exec(code_under("docs/guide.md", "Sleeping")[0], given)
    (weights,) = code_under("docs/guide.md", "Other weights")
    given["model"] = type("Model", (), {"state_dict": lambda self: {"model.norm.weight": torch.ones(32)}})()
    exec(weights.replace("path/to/checkpoint", names["model"]), given)
    assert names["llm"].generate("a", names["SamplingParams"](max_tokens=2))[0].finished


def test_the_family_of_the_page_passes_the_test_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ARCHITECTURES", dict(registry._ARCHITECTURES))
    family, test = code_under("docs/extending.md", "A model family")
    (tmp_path / "parallel_llama.py").write_text(family)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parallel_llama", raising=False)
    given: dict[str, Any] = {}
    exec(test, given)
    given["test_drafts_and_chunks_change_nothing"](tmp_path)


def test_the_page_names_what_subclasses_of_llama_override() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    table = page.partition("| override in the subclass of `Llama` |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", table)
    assert len(names) > 10 and [name for name in names if not hasattr(Llama, name)] == []


SCRIPTS = sorted({command for block in BLOCKS for command in block.commands if "python bench/" in command})


@pytest.mark.long
@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_of_measurements_start_and_know_their_flags(command: str) -> None:
    words = shlex.split(command.partition("python ")[2].split(" && ")[0])
    ran = subprocess.run([sys.executable, words[0], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300,
                         env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert ran.returncode == 0, ran.stderr
    missing = [word for word in words if word.startswith("--") and word not in ran.stdout]
    if missing:  # flags of the engine are in the long help
        ran = subprocess.run([sys.executable, words[0], "--help=all"], cwd=ROOT, capture_output=True, text=True,
                             timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert all(word in ran.stdout for word in missing), ran.stdout
