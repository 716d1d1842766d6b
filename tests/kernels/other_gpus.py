"""Compile recorded launches for a GPU that is not here, and say what its limits refuse.

    python -m tests.kernels.other_gpus launches.json 80      # or gfx942

Prints a JSON object: for each launch that was compiled the kernel's name, the bytes of shared memory that it takes, and
the error, if there was one.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

KIB = 1024
# Shared memory that one program may take, by compute capability (CUDA C programming guide, technical specifications)
# or by AMD's architecture (the local data share of a workgroup).
SHARED_BYTES = {"75": 64 * KIB, "80": 163 * KIB, "86": 99 * KIB, "89": 99 * KIB, "90": 227 * KIB, "100": 227 * KIB,
                "103": 227 * KIB, "120": 99 * KIB, "gfx942": 64 * KIB, "gfx950": 160 * KIB}


class OtherGpu:
    """What Triton asks the driver of a GPU while it compiles."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def rebuilt(value: Any) -> Any:
    """An argument of a launch, from what `recorded_launches.described` wrote."""
    from triton import language as tl

    if not isinstance(value, dict):
        return value
    match value:
        case {"tensor": name}:
            return torch.empty(64, dtype=getattr(torch, name))
        case {"dtype": name}:
            return tl.dtype(name)
        case {"tuple": parts, "of": ""}:
            return tuple(map(rebuilt, parts))
        case {"tuple": parts, "of": place}:
            module, name = place.split(":")
            return getattr(importlib.import_module(module), name)(*map(rebuilt, parts))
    raise ValueError(f"a launch with the argument {value}")


def tensor_types(value: Any) -> list[str]:
    match value:
        case {"tensor": name}:
            return [name]
        case {"tuple": parts}:
            return [name for each in parts for name in tensor_types(each)]
    return []


def size_of(launch: dict[str, Any]) -> float:
    return sum(value for value in launch["options"].values() if isinstance(value, int))


def chosen(launches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each kernel the launch with the largest tiles in float32 and in bfloat16, with and without fp8."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for launch in launches:
        if launch["kind"] == "JITFunction":  # Hopper's own are written in Gluon
            types = {name for value in launch["args"] for name in tensor_types(value)} & {"bfloat16", "float8_e4m3fn"}
            groups.setdefault((launch["module"], launch["name"], *sorted(types)), []).append(launch)
    for group in groups.values():
        yield max(group, key=size_of)


def compiled(launch: dict[str, Any], limit: int) -> dict[str, Any]:
    """What became of one launch."""
    found: dict[str, Any] = {"name": f"{launch['module'].removeprefix('outrider.kernels.gpu.')}.{launch['name']}",
                             "types": sorted({name for value in launch["args"] for name in tensor_types(value)})}
    try:
        function = getattr(importlib.import_module(launch["module"]), launch["name"]).function
        args, options = map(rebuilt, launch["args"]), {k: rebuilt(v) for k, v in launch["options"].items()}
        kernel = function.run(*args, grid=(1,), warmup=True, **options)
        found["shared"] = kernel.metadata.shared
        if kernel.metadata.shared > limit:
            found["error"] = f"shared memory: {kernel.metadata.shared} bytes, and the GPU has {limit}"
    except Exception as error:  # whatever the compiler raises is the result
        found["error"] = f"{type(error).__name__}: {str(error).strip()[-400:]}"
    return found


def main(path: str, name: str) -> None:
    from triton.runtime import driver

    driver.set_active(OtherGpu(name))  # type: ignore[arg-type]
    launches = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps([compiled(launch, SHARED_BYTES[name]) for launch in chosen(launches)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
