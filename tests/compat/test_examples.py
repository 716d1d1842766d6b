"""Every script of examples/ runs as it is printed, on a tiny model."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest

from outrider.kernels import cpu as native
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ASSETS = ROOT / "tests/assets"
STARTS_A_PROCESS = {"server_and_client"}
# What each must have printed, beside two lines.
PRINTED = {
    "adapter": r"without: (.*)\nwith the adapter: (?!\1\n)",
    "eagle_head": r"\d+ of \d+ drafts accepted",  # how many are tried depends on measured costs
    "embeddings": r"32 numbers",
    "exact": r"batch: equal bits: True\n.*drafts: equal bits: True",
    "own_drafter": r"equal tokens: True",
    "server_and_client": r"models: \['mine'\]",
    "speculation": r"equal tokens: True",
    "tools": r"-> high water in (Brest|Calais|Dover) is at",
}


def arguments(name: str, model: Path, folder: Path) -> list[str]:
    """The tiny model of these tests; for two scripts another one of bytes."""
    match name:
        case "eagle_head":  # the small trained model, since its head is here
            target, rest = shutil.copytree(ASSETS / "target", folder / "target"), [str(ASSETS / "eagle3")]
        case "exact":  # native attention has no heads of 8 columns
            config = CONFIGS["llama"] | {"vocab_size": 259, "head_dim": 32}
            target, rest = save_folder(folder / "wide", config, seed=5), []
        case _:
            return [str(model)]
    byte_tokenizer().backend.save(str(target / "tokenizer.json"))
    return [str(target), *rest]


@pytest.mark.parametrize("name", [
    pytest.param(path.stem, marks=[pytest.mark.long] if path.stem in STARTS_A_PROCESS else [])
    for path in sorted(EXAMPLES.glob("*.py"))
])
def test_an_example_runs(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    """As a main program, but in this process: another one would import torch once more."""
    if name == "exact" and not native.available():
        pytest.skip("exact mode on a CPU needs the native kernels")
    script = EXAMPLES / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(script), *arguments(name, model, tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) >= 2
    assert re.search(PRINTED.get(name, ""), shown), shown


def test_the_list_of_examples_is_whole() -> None:
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
