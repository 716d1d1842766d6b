"""Kernels compile for GPUs that are not here, and fit into their shared memory. Hopper's own kernels are left out: they
run on Hopper alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs the triton package")

ROOT = Path(__file__).parents[2]
# Tests that compile, or that launch what runs on Hopper alone; whole engines need results.
OTHERS = ("compile", "hopper", "cpu_linear", "native", "launch", "descriptors", "captured", "engine", "exact_attention",
          "other_gpus")
FP8 = "float8_e4m3fn"
LEAST_KERNELS = 95  # of the hundred that there are
WITHOUT_FP8 = ("75", "80", "86")  # compute capabilities below 8.9, for which the engine takes no fp8


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the other tests of this folder launch."""
    path = tmp_path_factory.mktemp("launches") / "launches.json"
    files = [str(file) for file in sorted(Path(__file__).parent.glob("test_*.py"))
             if not any(word in file.name for word in OTHERS)]
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=no", "-m", "not long", "-p",
                    "tests.kernels.recorded_launches", *files], cwd=ROOT, capture_output=True, check=False,
                   env=os.environ | {"TRITON_INTERPRET": "0", "OUTRIDER_RECORD": str(path)})
    return path


def compiled_for(gpu: str, launches: Path, tmp_path: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.other_gpus", str(launches), gpu], cwd=ROOT,
                          env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


AMD_REFUSES = {  # as the table in docs/deployment.md says
    "attention.decode._decode_kernel", "attention.exact_attention._exact_kernel", "attention.packs._packed_kernel",
    "gated_delta.prepare._prepare_kernel", "gated_delta.steps._delta_kernel", "index.choice._choice_kernel",
    "index.prefill._search_kernel", "linear.split._split_kernel", "recurrent.mamba2._mamba2_kernel",
    "sampling.edits._edit_kernel", "sampling.filtered_draw._weigh_kernel",
}


@pytest.mark.long
def test_what_stands_in_the_way_of_amd(launches: Path, tmp_path: Path) -> None:
    assert {each["name"] for each in compiled_for("gfx942", launches, tmp_path) if "error" in each} == AMD_REFUSES


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["75", "80", "86", "89", "90", "100", "103", "120"])
def test_kernels_compile_for_a_generation_of_nvidia(gpu: str, launches: Path, tmp_path: Path) -> None:
    found = compiled_for(gpu, launches, tmp_path)
    refused = [each for each in found if "error" in each]
    if gpu in WITHOUT_FP8:
        assert all(FP8 in each["types"] for each in refused), refused
        assert any(FP8 in each["types"] for each in refused), "it has fp8 after all"
    else:
        assert refused == []
    assert len({each["name"] for each in found}) >= LEAST_KERNELS
