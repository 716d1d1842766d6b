"""Every code block of README.md and docs/ is run by a test, needs a GPU and says so, or is no code.

RUN_BY says for each heading which test runs what stands under it. Flags of every command and imports of every piece of
Python are checked here, those of benchmarks for a GPU too.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import build_parser
from outrider.commands.parser import check_flags
from outrider.models import registry
from tests.compat.doc_blocks import ROOT, Block, all_blocks

BLOCKS = all_blocks()
NO_CODE = "a diagram, a form, or lines of output"
NEEDS_GPU = "needs a GPU"
OPERATOR = "needs a container runtime or systemd; tests/server/test_deploy.py reads the files that it uses"
MEASUREMENT = "takes minutes, and its result is a figure; the script starts and knows its flags"
HERE = "tests/compat/test_docs.py"
EXTENDING = "tests/unit/test_extending.py"
# Pages whose blocks are all of one sort, then headings of other pages.
PAGES = {"README.md": "tests/compat/test_readme.py", "docs/architecture.md": NO_CODE, "docs/extending.md": EXTENDING,
         "docs/training.md": "tests/training/test_trained_head.py"}  # fmt: skip
RUN_BY = {
    ("docs/adapters.md", "Adapters (LoRA)"): "tests/adapters/test_server.py",
    ("docs/benchmarks.md", "Experts spread by a hash"): NEEDS_GPU,
    ("docs/benchmarks.md", "Sparse attention"): "tests/unit/test_bench.py",
    ("docs/benchmarks.md", "Over HTTP"): NEEDS_GPU,
    ("docs/benchmarks.md", "Bursts, by simulation"): "tests/unit/test_bursts.py",
    ("docs/benchmarks.md", "On a CPU with AVX-512"): MEASUREMENT,
    ("docs/benchmarks.md", "On ARM"): MEASUREMENT,
    ("docs/benchmarks.md", "A Q4_K_M file on ARM beside llama.cpp"): MEASUREMENT,
    ("docs/benchmarks.md", "On x86 beside llama.cpp"): MEASUREMENT,
    ("docs/benchmarks.md", "n-gram drafts on a CPU"): "tests/compat/test_readme.py",
    ("docs/benchmarks.md", "Quality of formats"): "tests/engine/test_bench_quality.py",
    ("docs/benchmarks.md", "The scheduler"): MEASUREMENT,
    ("docs/deployment.md", "In a container"): OPERATOR,
    ("docs/deployment.md", "Under systemd"): OPERATOR,
    ("docs/deployment.md", "Watching it"): NO_CODE,
    ("docs/drafters.md", "Drafters"): "tests/compat/test_readme.py",
    ("docs/drafters.md", "Writing one"): "tests/drafters/test_custom.py",
    ("docs/exactness.md", "The check"): "tests/engine/test_verify.py",
    ("docs/exactness.md", "Exact mode"): "tests/engine/test_bench_exactness.py",
    ("docs/formats.md", "Files and formats"): HERE,
    ("docs/guide.md", "From Python"): HERE,
    ("docs/guide.md", "Scripts written for vLLM"): "tests/compat/test_alias.py",
    ("docs/guide.md", "Logits processors"): "tests/engine/test_logits_processors.py",
    ("docs/guide.md", "Embeddings"): HERE,
    ("docs/guide.md", "Embeddings in place of token ids"): HERE,
    ("docs/guide.md", "Prompts that attend in both directions"): "tests/engine/test_spans.py",
    ("docs/guide.md", "Sleeping"): HERE,
    ("docs/guide.md", "Other weights"): HERE,
    ("docs/replicas.md", "On one machine"): "tests/server/test_replica_processes.py",
    ("docs/replicas.md", "On Ray"): "tests/ray/test_ray_serve.py",
    ("docs/replicas.md", "Routers of others"): "tests/engine/test_kv_events.py",
    ("docs/scale.md", "Ranks: one model on several devices of a machine"): "tests/ranks/test_commands.py",
    ("docs/serving.md", "Serving"): "tests/server/test_serve.py",
    ("docs/serving.md", "Routes"): "tests/server/test_prompt_embeds.py",
    ("docs/serving.md", "Stored responses"): "tests/server/test_stored_responses.py",
    ("docs/serving.md", "Addresses and TLS"): "tests/server/test_listening.py",
    ("docs/serving.md", "Sleeping"): "tests/server/test_admin.py",
    ("docs/serving.md", "Measuring"): "tests/server/test_bench_serve.py",
    ("docs/serving.md", "Batches without a server"): "tests/server/test_batch.py",
    ("docs/serving.md", "Settings"): "tests/server/test_serve.py",
    ("docs/simulation.md", "Capacity by simulation"): "tests/unit/test_simulation.py",
    ("docs/simulation.md", "The load"): NO_CODE,
    ("docs/simulation.md", "1, 8, 64 and 1,024 GPUs"): MEASUREMENT,
    ("docs/stability.md", "Stability and upgrades"): "tests/compat/packages.py",
    ("docs/structured_output.md", "Structured output"): HERE,
}


def how(block: Block) -> str | None:
    if block.page in PAGES:
        return PAGES[block.page]
    if block.page == "docs/benchmarks.md" and "H200" in block.heading:
        return NEEDS_GPU
    return RUN_BY.get((block.page, block.heading))


def test_every_block_is_run_somewhere_or_says_why_not() -> None:
    unknown = [f"{block} ({block.heading})" for block in BLOCKS if how(block) is None]
    assert not unknown, f"say in RUN_BY of {HERE} which test runs these: {unknown}"
    assert not RUN_BY.keys() - {(block.page, block.heading) for block in BLOCKS}, "headings that are gone"
    tests = {where for where in [*PAGES.values(), *RUN_BY.values()] if where.startswith("tests/")}
    assert all((ROOT / where).is_file() for where in tests)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.commands], ids=str)
def test_flags_of_its_commands_are_understood(block: Block) -> None:
    for command in block.commands:
        if command.startswith("outrider ") and command.count("'") % 2 == 0:
            check_flags(build_parser().parse(shlex.split(command.split(" && ")[0].replace("FLAGS", ""))[1:]))
        elif script := re.search(r"python (bench/\w+\.py)", command):
            assert (ROOT / script[1]).is_file(), command


@pytest.mark.parametrize("block", [block for block in BLOCKS if "import " in block.text], ids=str)
def test_its_imports_are_there(block: Block) -> None:
    for module, names in re.findall(r"^\s*from (outrider[\w.]*) import ([\w, ]+)", block.text, re.M):
        found = importlib.import_module(module)
        assert all(hasattr(found, name.strip()) for name in names.split(",")), f"{module}: {names}"


def code_under(page: str, heading: str) -> list[str]:
    return [block.text for block in BLOCKS if (block.page, block.heading) == (page, heading)]


@pytest.mark.parametrize("page, heading", [("docs/guide.md", "From Python"),
                                           ("docs/structured_output.md", "Structured output")])  # fmt: skip
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


SCRIPTS = sorted({command for block in BLOCKS for command in block.commands if "python bench/" in command})


@pytest.mark.long
@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_of_measurements_start_and_know_their_flags(command: str) -> None:
    words = shlex.split(command.partition("python ")[2].split(" && ")[0])
    ran = subprocess.run([sys.executable, words[0], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300,
                         env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    missing = [word for word in words if word.startswith("--") and word not in ran.stdout]
    if missing:  # flags of the engine are in the long help
        ran = subprocess.run([sys.executable, words[0], "--help=all"], cwd=ROOT, capture_output=True, text=True,
                             timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)  # fmt: skip
    assert all(word in ran.stdout for word in missing), ran.stdout
