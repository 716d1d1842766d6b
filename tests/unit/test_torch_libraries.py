"""torch's libraries are loaded ahead where that is known to be right, and nowhere else."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine import torch_libraries


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns the libraries that are loaded if torch lies in `tmp_path` and has not been imported."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").touch()
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    asked: list[bytes] = []

    class Thread:
        def __init__(self, target: object, args: tuple[bytes, int]) -> None:
            self.path = args[0]

        def start(self) -> None:
            asked.append(self.path)

    monkeypatch.setattr(torch_libraries, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch_libraries.threading, "Thread", Thread)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return asked


def test_a_build_for_cpus_is_loaded(tmp_path: Path, loaded: list[bytes]) -> None:
    torch_libraries.load_torch_libraries_ahead()
    assert loaded == [bytes(tmp_path / "lib" / "libtorch_cpu.so")]


def test_a_build_for_cuda_is_left_to_torch(tmp_path: Path, loaded: list[bytes]) -> None:
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    torch_libraries.load_torch_libraries_ahead()
    assert not loaded


def test_where_torch_is_there_already_nothing_is_done(monkeypatch: pytest.MonkeyPatch, loaded: list[bytes]) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_libraries)
    torch_libraries.load_torch_libraries_ahead()
    assert not loaded


def run(after: str) -> subprocess.CompletedProcess[str]:
    program = f"from outrider.engine.torch_libraries import load_torch_libraries_ahead as ahead; ahead(); {after}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_torch_works_after_it() -> None:
    ran = run("import torch; print(torch.ones(2).sum().item())")
    assert ran.stdout.strip() == "2.0", ran.stderr


def test_a_process_may_end_meanwhile() -> None:
    for after in ("import sys; sys.exit(3)", "import sys, time; time.sleep(0.1); sys.exit(3)"):
        ran = run(after)
        assert ran.returncode == 3 and not ran.stderr
