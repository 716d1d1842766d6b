"""Experts of quantised files on the card: kept in their bits, with the bits of a request alone in exact mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.formats.scaled import ScaledExperts
from outrider.layers.base import find_modules
from outrider.layers.moe import Experts
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.gpu.rig import DEVICE, VOCAB, GpuRig, asks
from tests.gpu.test_exact import bits_of, with_logprobs
from tests.models import quantized_files as files

CONFIG: dict[str, Any] = files.MOE | {"vocab_size": VOCAB, "max_position_embeddings": 512}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8 blocks", "FP8_DYNAMIC", "W4A16", "MXFP4", "NVFP4"])
def test_bits_are_those_of_the_request_alone(name: str, tmp_path: Path) -> None:
    files.save_form(tmp_path, files.FORMS[name], CONFIG)
    model = load_model(resolve(tmp_path), dtype=torch.bfloat16, device=str(DEVICE), keep_quantized=True)
    assert all(isinstance(experts.format, ScaledExperts) for experts in find_modules([model], Experts))
    with GpuRig(model, source=tmp_path, exact=True, enable_prefix_caching=False) as rig:
        alone = bits_of([rig.run([ask])[0] for ask in with_logprobs()])
    with GpuRig(model, source=tmp_path, exact=True) as rig:
        assert bits_of(rig.run(with_logprobs())) == alone


@pytest.mark.gpu
def test_ordinary_steps_are_captured(tmp_path: Path) -> None:
    files.save_form(tmp_path, files.FORMS["FP8_DYNAMIC"], CONFIG)
    model = load_model(resolve(tmp_path), dtype=torch.bfloat16, device=str(DEVICE), keep_quantized=True)
    with GpuRig(model, source=tmp_path) as rig:
        assert all(output.outputs[0].error is None for output in rig.run(asks()))
        stats = rig.engine.stats
        assert sum(stats.uncaptured.values()) < stats.num_steps
