"""A head whose output is made of the target's rows, and one in 4-bit rows: both are forms of the shipped drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.pack_drafter import QUANTIZATION, packed
from outrider.config import EngineConfig
from outrider.formats.scaled import ScaledLinear
from outrider.models.base import Model
from outrider.runner.preparation import prepare_all
from tests.drafters.checkpoints import Drafter, make_drafter
from tests.drafters.rig import DraftRig
from tests.drafters.test_loading import changed, head_of, load, with_tensors
from tests.drafters.trained_heads import drafts_of
from tests.engine.harness import Ask as Request
from tests.engine.harness import greedy, prompt_of, tiny_model


def with_target_rows(folder: Path, target: Model) -> tuple[Drafter, Drafter]:
    """Two checkpoints of one head: with the target's rows as its own output, and without an output."""
    own = make_drafter("eagle3", "llama", folder / "own")
    ids = torch.arange(len(own.tensors["d2t"])) + own.tensors["d2t"]
    with_tensors(own, **{"lm_head.weight": target.lm_head.format.dense()[ids].clone()})
    bare = with_tensors(make_drafter("eagle3", "llama", folder / "bare"), drop=("lm_head.weight",))
    return own, changed(bare, target_output_rows=True)


def drafts_with(drafter: Drafter) -> dict[Any, Any]:
    asks = [Request(prompt_of(seed, 20), greedy(12)) for seed in range(4)]
    with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(3)) as rig:
        rig.run(asks)
        return drafts_of(rig)


def test_rows_of_the_target_draft_as_a_copy_of_them_in_the_file(tmp_path: Path) -> None:
    own, bare = with_target_rows(tmp_path, tiny_model("llama"))
    drafts = drafts_with(own)
    assert len(drafts) >= 4 and drafts == drafts_with(bare)


def test_the_rows_are_taken_again_when_the_target_has_other_weights(tmp_path: Path) -> None:
    target = tiny_model("llama")
    _, bare = with_target_rows(tmp_path, target)
    drafter = load(bare, target=target)
    head, table = head_of(drafter), target.lm_head.format.dense()
    before = table.clone()
    try:
        for factor in (1.0, 2.0):
            table.mul_(factor)
            prepare_all(target, drafter, EngineConfig("tiny"))
            assert torch.equal(head.own_output.format.dense(), factor * before[head.target_ids])
    finally:
        table.copy_(before)


def test_an_output_in_a_file_that_promises_none_is_refused(tmp_path: Path) -> None:
    drafter = changed(make_drafter("eagle3", "llama", tmp_path), target_output_rows=True)
    with pytest.raises(ValueError, match="target_output_rows says that the head has no lm_head.weight, and its files"):
        load(drafter)


@pytest.mark.parametrize("is_original", [True, False])
def test_a_head_in_4_bit_rows_keeps_them_on_a_cpu(is_original: bool, tmp_path: Path) -> None:
    """Tensors have the original's names or those of the packed form; without kept bits the numbers are the same."""
    drafter = make_drafter("eagle3", "llama", tmp_path)
    path = drafter.folder / "model.safetensors"
    codes, error = packed(load_file(path))
    assert 0 < error < 0.1
    codes["lm_head.weight"] = drafter.tensors["lm_head.weight"]
    renamed = {name.replace("layers.0.", "midlayer.") if is_original else name: t for name, t in codes.items()}
    save_file(renamed, path)
    changed(drafter, quantization_config={**QUANTIZATION, "ignore": ["lm_head"]})
    kept, plain = (head_of(load(drafter, keep_quantized=keep)) for keep in (True, False))
    for one, other in zip(_linears(kept), _linears(plain), strict=True):
        assert isinstance(one.format, ScaledLinear) and not isinstance(other.format, ScaledLinear)
        numbers = one.format.look_up(torch.arange(one.out_features))
        assert torch.allclose(numbers.double(), other.format.dense(), rtol=1e-6, atol=0)


def _linears(head: Any) -> list[Any]:
    return [head.fc, head.first.attention.qkv, head.first.attention.out, head.first.mlp.gate_up, head.first.mlp.down]
