"""Every script of examples/ runs as it is printed, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(script: Path, model: Path) -> None:
    done = subprocess.run([sys.executable, str(script), str(model)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert "equal tokens: False" not in done.stdout
