"""Tests that need a card: skipped with a reason elsewhere, and spread over processes there, since they mostly compile.

    python3 -m pytest tests/gpu -q -p no:cacheprovider        OUTRIDER_GPU_PROCESSES=1: all in one process
    OUTRIDER_GPU_ALL=1 ...                                    also what `choice` leaves out, and what is marked long
    OUTRIDER_GPU_TESTS=cpu ...                                a rehearsal on the CPU of what does not need a card

Tests marked `together("name")` share a process, and with it models, engines and compiled kernels. Every test adds a
line to gpu-tests.txt in the folder $OUT (or a temporary one) when it ends, so that a run that is cut off can be read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.choice import KEPT, is_chosen, seconds_of

HAS_CARD = torch.cuda.is_available()
IS_REHEARSAL = not HAS_CARD and os.environ.get("OUTRIDER_GPU_TESTS") == "cpu"
RUNS_ALL = os.environ.get("OUTRIDER_GPU_ALL") == "1"
SHARD = os.environ.get("OUTRIDER_GPU_SHARD")  # "1/8" in the second of eight processes
HERE = Path(__file__).parent
OTHERS = "test_other_processes"
REPORT, PRINTED = "gpu-tests.txt", "gpu-processes.txt"
COMPILE_THREADS = "3"  # of each process, while an engine starts
START = float(os.environ.get("OUTRIDER_GPU_START") or time.time())
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
    if HAS_CARD:
        torch.set_float32_matmul_precision("highest")  # float32 is compared to 1e-5


# Which tests run, and where


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
    # A test that is asked for by its name runs, chosen or not.
    chosen = ours if RUNS_ALL or any("::" in str(arg) for arg in config.args) else _chosen(ours)
    index, count = map(int, SHARD.split("/")) if SHARD else (0, num_processes() if shared else 1)
    places = _places(chosen, count)
    kept = [item for item in chosen if OTHERS not in item.nodeid and places[_group(item)] == index]
    kept.sort(key=lambda item: (_is_kernel_test(item), -seconds_of(_group(item)), _group(item)))
    if count > 1 and not SHARD:
        kept += [item for item in ours if OTHERS in item.nodeid]  # last: they wait
    gone = [item for item in ours if item not in kept]
    if gone:
        config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in ours] + kept
    if shared and not SHARD and not config.option.collectonly:
        _start(config, count)


def _chosen(items: list[pytest.Item]) -> list[pytest.Item]:
    chosen, names = [], set()
    for item in items:
        test, _, case = item.name.partition("[")
        callspec = getattr(item, "callspec", None)
        dtype = callspec.params.get("dtype") if callspec is not None and HAS_CARD else None
        is_long = item.get_closest_marker("long") is not None
        if not is_long and (not _is_kernel_test(item) or is_chosen(test, case.removesuffix("]"), dtype)):
            chosen.append(item)
            names.add(test)
    lost = {item.name.partition("[")[0] for item in items} - names
    wrong = [test for test in lost if test.removeprefix("test_triton_") in KEPT]
    if wrong:
        raise pytest.UsageError(f"tests/gpu/choice.py leaves no case of {wrong}")
    return chosen


def _places(items: list[pytest.Item], count: int) -> dict[str, int]:
    """The process of each group: the slowest first, each to whoever has least to do."""
    groups = sorted({_group(item) for item in items}, key=lambda group: (-seconds_of(group), group))
    loads, places = [0] * count, {}
    for group in groups:
        places[group] = loads.index(min(loads))
        loads[places[group]] += seconds_of(group)
    return places


def _is_kernel_test(item: pytest.Item) -> bool:
    return item.path.stem in ("test_kernels", "test_attention")


def _group(item: pytest.Item) -> str:
    if item.path.stem == "test_kernels":
        return f"kernels {item.name.removeprefix('test_triton_').partition('__')[0]}"
    marker = item.get_closest_marker("together")
    return item.nodeid if marker is None else str(marker.args[0])


# Processes and what they report


def _folder() -> Path:
    """The folder of the report and of what the processes print; the first process names it to the others."""
    given = os.environ.get("OUTRIDER_GPU_LOGS")
    if given is None:
        given = os.environ.get("OUT") or tempfile.mkdtemp(prefix="outrider-gpu-")
        os.environ["OUTRIDER_GPU_LOGS"] = given
        Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given)


def _start(config: pytest.Config, count: int) -> None:
    os.environ.setdefault("OUTRIDER_COMPILE_THREADS", COMPILE_THREADS)
    for name in (REPORT, PRINTED):
        _folder().joinpath(name).unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="outrider-gpu-"))
    for index in range(1, count):
        log = scratch / f"process-{index}.log"
        environment = os.environ | {"OUTRIDER_GPU_SHARD": f"{index}/{count}", "OUTRIDER_GPU_START": str(START),
                                    "COLUMNS": "240"}
        command = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args), "-rA", "--durations=8",
                   "--tb=short"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment,
                                       cwd=config.invocation_params.dir)
        _RUNNING[index] = (process, log)


def _report(nodeid: str, what: str, details: str = "") -> None:
    """In one write, so that lines of several processes do not mix."""
    path, _, name = nodeid.partition("::")
    is_ours = HERE.name in Path(path).parts and "PYTEST_XDIST_WORKER" not in os.environ
    if is_ours and (HAS_CARD or IS_REHEARSAL):
        process = SHARD.partition("/")[0] if SHARD else "0"
        text = f"{time.time() - START:6.1f} s  process {process:>2}  {what:17}  {name}\n"
        text += "".join(f"        {line}\n" for line in details.splitlines()[-40:])
        with _folder().joinpath(REPORT).open("a") as file:
            file.write(text)


def pytest_runtest_logstart(nodeid: str) -> None:
    if "test_kernels.py" not in nodeid:  # they are many, and short
        _report(nodeid, "begins")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        what = f"{report.outcome:7}  {report.duration:6.2f} s"
        _report(report.nodeid, what, report.longreprtext if report.failed else "")


def summary_of(index: int) -> str:
    """Results of another process: counts, and what failed with its error."""
    process, log = _RUNNING[index]
    lines = log.read_text(errors="replace").splitlines() or ["nothing printed"]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    slow = [line for line in lines if re.match(r"\d+\.\d+s call ", line)][:2]
    state = "still running" if process.poll() is None else f"exit {process.returncode}"
    return "\n    ".join([f"process {index} ({state}): {lines[-1].strip('= ')}", *failed, *slow])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _RUNNING:
        return
    terminalreporter.section("other processes")
    for index in _RUNNING:
        terminalreporter.write_line(summary_of(index))
    terminalreporter.write_line(f"every test: {_folder() / REPORT}")


def pytest_unconfigure(config: pytest.Config) -> None:
    for process, log in _RUNNING.values():
        if process.poll() is None:
            process.kill()
        with _folder().joinpath(PRINTED).open("a") as file:
            file.write(f"{log.stem}\n{log.read_text(errors='replace')}\n")
        log.unlink()


@pytest.fixture
def other_process(request: pytest.FixtureRequest) -> tuple[int, str]:
    """(status, summary) of a process, when it has ended."""
    if request.param not in _RUNNING:
        pytest.skip("there is no such process")
    status = _RUNNING[request.param][0].wait(timeout=600)
    return status, summary_of(request.param)


# What tests take


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
