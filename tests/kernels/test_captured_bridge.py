"""A model of transformers in steps that run as captured ones do, through Triton kernels, under the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.engine.harness import random_model
from tests.kernels.test_captured_steps import both_ways
from tests.models.test_bridge_parts import STARCODER

# Attention as one block with a rope, and attention that transformers' own code calls with q, k and v.
PHI = {key: value for key, value in STARCODER.items() if key != "sliding_window"} | {
    "architectures": ["PhiForCausalLM"]}


@pytest.mark.long
@pytest.mark.parametrize("config", [STARCODER, PHI], ids=["block", "function"])
def test_a_bridged_model_runs_in_captured_steps(device: torch.device, config: dict[str, object]) -> None:
    captured, _ = both_ways(random_model(config, torch.float32, 3))
    assert len(captured.met) > 4 and not captured.reasons
