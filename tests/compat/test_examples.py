"""Every script of examples/ runs as it is printed, on a tiny model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(script: Path, model: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    """As a main program, but in this process: another one would import torch once more."""
    monkeypatch.setattr("sys.argv", [str(script), str(model)])
    runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) >= 2
    assert "equal tokens: False" not in shown
