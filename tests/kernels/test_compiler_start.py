"""Triton's compiler is hashed before torch is there, where a GPU is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.kernels import compiler_start


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """When the compiler was hashed. There are a GPU and a Triton."""
    times: list[float] = []
    monkeypatch.setattr(compiler_start, "_hashing", [])
    monkeypatch.setattr(compiler_start, "_DRIVER", tmp_path)
    monkeypatch.setattr(compiler_start, "find_spec", lambda name: name)
    monkeypatch.setattr(compiler_start, "_hash", lambda: times.append(time.monotonic()))
    return times


def wait() -> None:
    for thread in compiler_start._hashing:
        thread.join()


def test_it_is_hashed_once(hashed: list[float]) -> None:
    for _ in range(3):
        compiler_start.hash_compiler_ahead()
    wait()
    assert len(hashed) == 1


def test_not_for_a_cpu(hashed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_start.hash_compiler_ahead("cpu")
    monkeypatch.setattr(compiler_start, "_DRIVER", tmp_path / "none")
    compiler_start.hash_compiler_ahead()
    assert not compiler_start._hashing and not hashed


def test_not_without_triton(hashed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_start, "find_spec", lambda name: None)
    compiler_start.hash_compiler_ahead()
    assert not compiler_start._hashing and not hashed


@pytest.mark.parametrize("after", ["sys.exit(3)", "import torch; sys.exit(3)"])
def test_a_process_may_end_meanwhile_or_import_torch(after: str) -> None:
    pytest.importorskip("triton", reason="needs the triton package")
    program = ("import sys; from pathlib import Path; from outrider.kernels import compiler_start; "
               f"compiler_start._DRIVER = Path('/'); compiler_start.hash_compiler_ahead(); {after}")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 3 and not ran.stderr
