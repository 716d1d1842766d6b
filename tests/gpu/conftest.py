"""Tests that need a card: skipped with a reason elsewhere, and spread over processes there, since they mostly compile.

    python3 -m pytest tests/gpu -q -p no:cacheprovider        OUTRIDER_GPU_PROCESSES=1: all in one process
    OUTRIDER_GPU_TESTS=cpu ...                                a rehearsal on the CPU of what does not need a card

Tests marked `together("name")` share a process, and with it models, engines and compiled kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HAS_CARD = torch.cuda.is_available()
IS_REHEARSAL = not HAS_CARD and os.environ.get("OUTRIDER_GPU_TESTS") == "cpu"
SHARD = os.environ.get("OUTRIDER_GPU_SHARD")  # "1/8" in the second of eight processes
HERE = Path(__file__).parent
OTHERS = "test_other_processes"
_RUNNING: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}

for _path in (HERE.parent / "kernels").glob("test_triton_*.py"):
    pytest.register_assert_rewrite(f"tests.kernels.{_path.stem}")


def num_processes() -> int:
    given = os.environ.get("OUTRIDER_GPU_PROCESSES")
    if given is not None:
        return max(1, int(given))
    return max(1, min(12, (os.cpu_count() or 2) - 2)) if HAS_CARD else 1


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "together(name): runs in one process with the others of that name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not HAS_CARD:
        reason = "needs a CUDA device, and torch finds none here"
        for item in ours:
            if not IS_REHEARSAL or item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        if not IS_REHEARSAL:
            return
    shared = num_processes() > 1 and len(ours) == len(items) > num_processes() and not hasattr(config, "workerinput")
    index, count = map(int, SHARD.split("/")) if SHARD else (0, num_processes() if shared else 1)
    if count > 1 or SHARD:
        kept = [item for item in ours if _process_of(item, ours, count) == index]
    else:
        kept = [item for item in ours if OTHERS not in item.nodeid]
    gone = [item for item in ours if item not in kept]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
    if shared and not SHARD and not config.option.collectonly:
        _start(config, count)


def _process_of(item: pytest.Item, items: list[pytest.Item], count: int) -> int:
    """Whoever belongs together goes in turn with the others; who waits for the other processes stays in the first."""
    if OTHERS in item.nodeid:
        return 0 if not SHARD else -1
    names = list(dict.fromkeys(_name(one) for one in items if OTHERS not in one.nodeid))
    return names.index(_name(item)) % count


def _name(item: pytest.Item) -> str:
    marker = item.get_closest_marker("together")
    return item.nodeid if marker is None else str(marker.args[0])


def _start(config: pytest.Config, count: int) -> None:
    for index in range(1, count):
        log = Path(tempfile.mkstemp(prefix="outrider-gpu-")[1])
        environment = os.environ | {"OUTRIDER_GPU_SHARD": f"{index}/{count}"}
        command = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment,
                                       cwd=config.invocation_params.dir)  # fmt: skip
        _RUNNING[index] = (process, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    for process, log in _RUNNING.values():
        if process.poll() is None:
            process.kill()
        log.unlink(missing_ok=True)


@pytest.fixture
def other_process(request: pytest.FixtureRequest) -> tuple[int, str]:
    """(status, output) of a process, when it has ended."""
    if request.param not in _RUNNING:
        pytest.skip("there is no such process")
    process, log = _RUNNING[request.param]
    status = process.wait(timeout=600)
    return status, log.read_text(errors="replace")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CARD else torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"] if HAS_CARD else ["float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Engines of different tests live one after the other; processes share the card."""
    yield
    if HAS_CARD:
        torch.cuda.synchronize()
