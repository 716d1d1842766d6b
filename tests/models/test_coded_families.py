"""Unquantised folders of every family are coded while they are read, and the model still says about the same.

Long: two models of each family are built and run. How far codes lie from numbers is asked in `test_quantized_files.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outrider.config import EngineConfig
from outrider.models.sources import resolve
from outrider.runner.target import load_target
from tests.models import oracle
from tests.ranks.families import Text

pytestmark = pytest.mark.long
MOST_CHANGED = 0.7  # of the last hidden states: those of a matrix that was read the wrong way round differ by 1.4


def final_states(folder: Path, quantization: str | None) -> torch.Tensor:
    config = EngineConfig(str(folder), device="cpu", dtype="float32", quantization=quantization)
    model = load_target(config, resolve(folder))
    return Text(model).add(oracle.tokens_of(seed=1, count=24).tolist()).final


@pytest.mark.parametrize("family", oracle.ALL)
def test_a_family_is_coded_while_it_is_read(family: str, tmp_path: Path) -> None:
    kind = "ForConditionalGeneration" if family in oracle.CONDITIONAL else "ForCausalLM"
    if not hasattr(transformers, oracle.ALL[family][0] + kind):
        pytest.skip(f"transformers {transformers.__version__} has no {oracle.ALL[family][0]}")
    folder = oracle.make_folder(family, tmp_path / family)
    numbers = final_states(folder, None)
    for quantization in ("fp8", "int4"):
        changed = (final_states(folder, quantization) - numbers).norm() / numbers.norm()
        assert 0 < changed < MOST_CHANGED, f"{quantization}: {changed}"
