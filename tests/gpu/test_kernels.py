"""The tests of tests/kernels, compiled for the card and in bf16 too; under the interpreter they run without one.

They compare with the plain reference, poison what nobody may read, and pad. Engines there run on the CPU and are
skipped here: `test_engines` has its own.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.gpu.conftest import HAS_CARD, IS_REHEARSAL

KERNELS = Path(__file__).parents[1] / "kernels"


def _adopt(stem: str) -> None:
    """Every test of a module becomes one of this."""
    try:
        module = importlib.import_module(f"tests.kernels.{stem}")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        globals()[f"{stem}__needs_hypothesis"] = pytest.mark.skip(reason=f"{stem} needs hypothesis")(lambda: None)
        return
    for name, value in vars(module).items():
        if name.startswith("test_") and callable(value):
            globals()[f"{stem}__{name.removeprefix('test_')}"] = value


if HAS_CARD or IS_REHEARSAL:
    for _path in sorted(KERNELS.glob("test_triton_*.py")):
        _adopt(_path.stem)
else:

    def test_kernels_on_the_card() -> None:
        """Stands for all of them where there is no card."""
