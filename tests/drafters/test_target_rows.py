"""Outputs of heads that are made of the target's: reduced ones, 4-bit rows as in the shipped drafter, and a copy of the
whole output in 8 bits, which heads on a GPU draft from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.pack_drafter import QUANTIZATION, packed
from outrider.config import EngineConfig
from outrider.formats.scaled import ScaledLinear
from outrider.kernels.scaled import to_int8_groups
from outrider.layers import NothingAttends, StepContext
from outrider.models.base import Decoder, Model
from outrider.models.mtp import build_mtp_modules
from outrider.models.target_rows import GROUP, MOST_TOKEN_ROWS, RoundedOutput
from outrider.runner.preparation import prepare_all
from tests.drafters.checkpoints import VOCAB, Drafter, make_drafter
from tests.drafters.rig import DraftRig
from tests.drafters.test_loading import changed, head_of, load, with_tensors
from tests.drafters.trained_heads import drafts_of
from tests.engine.harness import CONFIGS, greedy, prompt_of, random_model, tiny_model
from tests.engine.harness import Ask as Request


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
    with pytest.raises(ValueError, match="target_output_rows=true means that the head has no lm_head.weight"):
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


def test_a_rounded_output_makes_the_logits_of_few_token_rows_alone() -> None:
    target = random_model(CONFIGS["llama"], torch.float64, seed=5)
    assert isinstance(target, Decoder)
    target.logit_scale, target.softcap = 0.5, 3.0
    rounded = RoundedOutput(target)
    rounded.take()
    table = target.lm_head.format.dense()
    hidden = torch.randn(3, target.hidden_size, dtype=table.dtype)
    raw = 0.5 * hidden @ to_int8_groups(table, GROUP).numbers().to(table.dtype).t()
    expected = 3.0 * torch.tanh(raw / 3.0)
    made = rounded.logits(hidden, StepContext(NothingAttends(), torch.zeros(3, dtype=torch.int64)))
    torch.testing.assert_close(made, expected.to(made.dtype), rtol=1e-5, atol=1e-6)
    assert rounded.serves(hidden) and not rounded.serves(hidden[:1].expand(MOST_TOKEN_ROWS + 1, -1))


def test_a_head_drafts_from_a_rounded_output_and_follows_the_target(tmp_path: Path) -> None:
    """As a GPU makes it for large outputs: drafts of a head whose output is the target's come from the copy, which is
    taken again when the target has other weights."""
    target = tiny_model("llama")
    drafter = load(make_drafter("eagle", "llama", tmp_path), target=target)
    head, table = head_of(drafter), target.lm_head.format.dense()
    assert head.own_output is None and head.rounded_output is None  # a CPU reads the target's own
    before, bytes_before = table.clone(), drafter.weight_bytes()
    head.rounded_output = RoundedOutput(target)
    assert drafter.weight_bytes() == bytes_before + table.numel() * (GROUP + 2) // GROUP
    hidden = torch.randn(2, head.hidden_size, dtype=table.dtype)
    context = StepContext(NothingAttends(), torch.zeros(2, dtype=torch.int64))
    try:
        for factor in (1.0, -2.0):
            table.copy_(factor * before)
            prepare_all(target, drafter, EngineConfig("tiny"))
            logits, exact = head.logits(hidden, context), target.logits(hidden, context)
            assert not torch.equal(logits, exact)
            torch.testing.assert_close(logits, exact, rtol=0.0, atol=0.02 * float(exact.abs().max()))
    finally:
        table.copy_(before)


def test_small_outputs_and_those_of_a_cpu_are_not_rounded() -> None:
    assert RoundedOutput.try_build(tiny_model("llama")) is None


def test_modules_of_one_target_share_a_copy() -> None:
    """One head holds and renews the copy; the others draft from it."""
    target = random_model(CONFIGS["llama"], torch.float64, seed=5)
    first, second = (build_mtp_modules(target, first_layer=2, dtype=torch.float64, device=torch.device("cpu"))[0]
                     for _ in range(2))
    bare = second.weight_bytes()
    first.rounded_output = RoundedOutput(target)
    second.borrow_output(first)
    assert second.rounded_output is first.rounded_output and second.weight_bytes() == bare < first.weight_bytes()
    second.follow_target()
    hidden, context = torch.randn(1, target.hidden_size, dtype=torch.float64), StepContext(
        NothingAttends(), torch.zeros(1, dtype=torch.int64))
    first.follow_target()
    assert torch.equal(first.logits(hidden, context), second.logits(hidden, context))


def test_a_vocabulary_in_another_order_needs_an_output_in_that_order(tmp_path: Path) -> None:
    own = make_drafter("eagle3", "llama", tmp_path, draft_vocab_size=VOCAB)
    swapped = torch.arange(VOCAB)
    swapped[[3, 5]] = swapped[[5, 3]]
    bare = with_tensors(own, drop=("lm_head.weight",), d2t=swapped - torch.arange(VOCAB))
    with pytest.raises(ValueError, match="d2t gives the head's tokens another order than the target's, and the head"):
        load(bare)
