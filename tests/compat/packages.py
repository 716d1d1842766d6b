"""Tries the wheel and the sdist of a folder in empty environments: the wheel with pip, the sdist with uv.

    make dist && make try-dist
    python -m tests.compat.packages dist [FOLDER]     keeps the environments in FOLDER

Each gets torch as constraints.txt has it, then the package with its server. `outrider` then tells its version and its
environment, and generates with a small random model that is written here, so that nothing else is fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.compat.place import Place, outside_environment

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
# A folder with a config alone is a model of random weights, and token ids need no tokenizer.
MODEL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
         "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
PROGRAM = """
from outrider import LLM, SamplingParams
drafts = {"method": "ngram", "num_speculative_tokens": 3}
with LLM("model", load_format="dummy", skip_tokenizer_init=True, speculative_config=drafts) as llm:
    (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=8))
    print(len(output.outputs[0].token_ids), "tokens")
"""


def build_wheel(dist: Path) -> None:
    """The wheel of this tree, made from a copy: a build leaves folders behind, and takes up what others left."""
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "source"
        shutil.copytree(ROOT / "outrider", source / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", dist, source)


def install(package: Path, tool: str, folder: Path, extras: str = "server") -> Place:
    """A fresh environment with this package and nothing else, and an empty folder to work in."""
    venv = folder / f"{tool}-{package.name}"
    command: list[str | Path]
    if tool == "uv":
        uv = Path(sys.executable).parent / "uv"
        _run(uv, "venv", "-q", "--python", sys.executable, venv)
        command = [uv, "pip", "install", "-q", "--python", venv / "bin/python", *_places_of_pip()]
    else:
        _run(sys.executable, "-m", "venv", venv)
        command = [venv / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    (torch,) = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    _run(*command, torch)
    _run(*command, "-c", CONSTRAINTS, f"{package}[{extras}]")
    work = folder / f"work-{venv.name}"
    work.mkdir(parents=True)
    return Place(venv / "bin", work)


def try_package(package: Path, tool: str, folder: Path) -> None:
    """Installs the package into a fresh environment, in which it must answer."""
    start = time.monotonic()
    place = install(package, tool, folder)
    (place.folder / "model").mkdir()
    (place.folder / "model/config.json").write_text(json.dumps(MODEL))
    for command in ("outrider --version", "outrider env", "outrider models", "outrider serve --help"):
        ran = place.run(command, timeout=600)
        assert ran.returncode == 0 and ran.stdout, f"{command}\n{ran.stdout}\n{ran.stderr}"
    ran = place.python(PROGRAM)
    assert ran.stdout.endswith("8 tokens\n"), f"{ran.stdout}\n{ran.stderr}"
    print(f"{package.name} with {tool}: works, {time.monotonic() - start:.0f} s", flush=True)


def _places_of_pip() -> list[str]:
    """Folders of wheels that pip is told of by PIP_FIND_LINKS, as flags for uv, which does not read that variable: a
    build of torch for a CPU that lies there is not fetched again, or as one for CUDA."""
    return [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, env=outside_environment())


def main(dist: Path, folder: Path) -> None:
    (wheel,), (sdist,) = dist.glob("outrider-*.whl"), dist.glob("outrider-*.tar.gz")
    try_package(wheel.resolve(), "pip", folder)
    try_package(sdist.resolve(), "uv", folder)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(sys.argv[1]), Path(made))
