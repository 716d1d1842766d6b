"""Settings of every test run: one thread per process, reproducible hypothesis, and the mutant to apply, if any."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: tests run in several processes, and more threads than cores make them slower.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    # Before anything imports triton, which transformers' model classes do.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.garbage import collections_paused, freeze_before_test


def _set_hypothesis(profile: str) -> None:
    """Machines with a card may lack it; tests that need it say so."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, Phase, settings

    slow_is_fine = (HealthCheck.too_slow, HealthCheck.data_too_large)
    settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=slow_is_fine)
    settings.register_profile("long", deadline=None, max_examples=2000, suppress_health_check=slow_is_fine)
    # Under a mutant only the failure matters, not its smallest example.
    settings.register_profile("mutant", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
    settings.load_profile(profile)


def _apply_mutant(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"mutant_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"not a Python file: {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.apply()


if _mutant := os.environ.get("OUTRIDER_MUTANT"):
    # Before collection, so that the test modules import what the mutant has put in place.
    _apply_mutant(Path(_mutant))
    _set_hypothesis("mutant")
else:
    _set_hypothesis("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with collections_paused():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    freeze_before_test()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Only if some test imported torch: the tests of scheduler and cache run without it.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
