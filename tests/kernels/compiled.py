"""Kernels as Triton compiles them for a card, which none is needed for: in a process without its interpreter, and by
their PTX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def found_without_interpreter(test_file: str, *arguments: str) -> Any:
    """The JSON that a test's file prints when it runs as a program with these arguments. Its tests run in processes in
    which Triton's interpreter is on, where nothing is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, test_file, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def compiling(ptx: list[str] | None = None) -> Iterator[list[str]]:
    """Within, launches compile their kernels for an H200 and run nothing. The list has the kernels' names, and `ptx`
    gets their PTX. A kernel whose matrix instructions read memory that is not its program's fails."""
    from triton.runtime import driver

    from outrider.kernels.gpu.launch import triton_kernel as launch
    from tests.kernels.descriptors import stray_descriptors
    from tests.kernels.test_sampler_compiles import Card

    driver.set_active(Card())  # type: ignore[arg-type]
    found: list[str] = []

    def compile_one(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernel = function.run(*args, grid=(1,), warmup=True, **options)
        assert stray_descriptors(kernel) == [], function.fn.__name__
        found.append(function.fn.__name__)
        if ptx is not None:
            ptx.append(kernel.asm["ptx"])

    with launch.collecting(compile_one):
        yield found


def overwritten_barriers(ptx: str) -> list[int]:
    """Places in shared memory that are made barriers and that ordinary loads and stores name as well."""
    names = set(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx))
    places = {name: int(place) for name, start, place in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx)
              if start in names}
    places |= dict.fromkeys(names, 0)
    barriers = {places[name] for name in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)}
    assert barriers, "a kernel with barriers, or this does not know how they are written"
    # Bytes are Triton's own, one for each warp that is not of the first kind; their place is counted from warp 0.
    named = re.findall(r"(?:ld|st)\.shared(?!\.b8)\S*\s[^\[\n]*\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]", ptx)
    used = {places.get(name, 0) + int(offset or 0) for name, offset in named}
    assert used, "ordinary loads and stores, too"
    return sorted(place for place in used if place // 8 * 8 in barriers)
