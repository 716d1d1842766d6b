"""Whole engines with experts of codes and scales, whose products are Triton's under its interpreter: the tokens are
those of the products of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.formats.scaled import ScaledExperts
from outrider.kernels import ops
from outrider.kernels.gpu.experts.scaled import scaled_experts
from outrider.layers.base import find_modules
from outrider.layers.moe import Experts
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.engine.harness import Ask, Rig, greedy
from tests.models import quantized_files as files

LONG = [pytest.param(name, marks=pytest.mark.long)
        for name in ("fp8 static", "FP8_DYNAMIC", "W4A16", "W4A16_ASYM", "MXFP4", "NVFP4")]


@pytest.fixture
def run_in_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Experts are multiplied in Triton from now on, and not by native code. The list has the token rows of each
    call."""
    monkeypatch.setattr("outrider.formats.scaled.is_on_host", lambda declared: False)
    if device.type != "cpu":
        pytest.skip("engines on the card are in tests/gpu")
    before, num_rows = ops.scaled_experts.kernels, []

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        num_rows.append(x.shape[0])
        return scaled_experts(x, *args)

    ops.scaled_experts.add(ops.Kernel("interpreted", "cpu", run, ops.FLOAT32))
    yield num_rows
    ops.scaled_experts.kernels = before
    ops.scaled_experts.force("")


def tokens_of(model: Model) -> list[list[int]]:
    asks = [Ask(prompt, greedy(3, ignore_eos=True)) for prompt in ([3, 1, 4], [7] * 20)]
    with Rig(model, max_model_len=64) as rig:
        return [list(output.outputs[0].token_ids) for output in rig.run(asks)]


@pytest.mark.parametrize("name", ["fp8 blocks", *LONG])
def test_tokens_are_those_of_the_host(name: str, tmp_path: Path, run_in_triton: list[int]) -> None:
    files.save_form(tmp_path / "quantised", files.FORMS[name], files.MOE)
    model = load_model(resolve(tmp_path / "quantised"), dtype=torch.float32, device="cpu", keep_quantized=True)
    for experts in find_modules([model], Experts):
        assert isinstance(experts.format, ScaledExperts)
        experts.format._rounds = name.lower().startswith("fp8")  # as on a GPU
    found = tokens_of(model)
    assert max(run_in_triton) >= 20 and min(run_in_triton) < 4, "prompts and single tokens"
    with ops.using("host", ops.scaled_experts):
        assert tokens_of(model) == found
