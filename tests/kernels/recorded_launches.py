"""A plugin of pytest that writes down what the tests of this folder launch, and runs no kernel. It has the types and
sizes with which kernels are compiled; `test_other_gpus.py` compiles them for GPUs that are not here.

    TRITON_INTERPRET=0 OUTRIDER_RECORD=launches.json python -m pytest -p tests.kernels.recorded_launches tests/kernels

Results stay empty, so most tests fail after their launches, which is no matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

LAUNCHES: dict[str, dict[str, Any]] = {}  # by their own JSON


def described(value: Any) -> Any:
    """What the compiler looks at in an argument, as JSON."""
    from triton import language as tl

    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, tuple):  # of arguments that are passed together, or plain
        of = f"{type(value).__module__}:{type(value).__qualname__}" if hasattr(value, "_fields") else ""
        return {"tuple": [described(each) for each in value], "of": of}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"other": type(value).__name__}


def note(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    launch = {"module": function.fn.__module__, "name": function.fn.__name__, "kind": type(function).__name__,
              "args": [described(each) for each in args],
              "options": {name: described(each) for name, each in options.items()}}
    LAUNCHES.setdefault(json.dumps(launch, sort_keys=True), launch)


@pytest.fixture(autouse=True)
def recorded() -> Iterator[None]:
    from outrider.kernels.gpu.launch.triton_kernel import collecting

    with collecting(note):
        yield


def pytest_sessionfinish() -> None:
    Path(os.environ["OUTRIDER_RECORD"]).write_text(json.dumps(list(LAUNCHES.values())), encoding="utf-8")
