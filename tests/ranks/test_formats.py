"""Weights that keep the bits of their files, sharded over ranks. Groups of inputs that cannot be are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from outrider import formats
from outrider.config import EngineConfig
from outrider.formats import RankGroup, StoredFormat, UnsummedRanks
from outrider.kernels import cpu as native
from outrider.layers.base import Module
from outrider.models.loader import declare_formats, load_dummy, load_model, load_weights
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.runner.cache_plan import find_cache_scales
from tests.engine import test_quantized as gguf
from tests.models import quantized_files as files
from tests.ranks.families import Text, config_of, states_of
from tests.ranks.pool import RankPool

WIDE = {"head_dim": 64}  # so that half of the heads are whole groups of 128 inputs
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
QUICK = ("fp8 blocks", "W4A16_ASYM", "experts")


def run_files(group: RankGroup | None, folder: Path) -> Any:
    model = load_model(resolve(folder), dtype=torch.float64, device="cpu", keep_quantized=True, group=group)
    kinds = {name: slot.kind for name, slot in model.weights().items()}
    return states_of(model, PROMPT, 6), kinds


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long)
                                  for name in (*files.FORMS, "experts")])
def test_ranks_keep_the_bits_of_files(ranks: RankPool, name: str, tmp_path: Path) -> None:
    form = files.FORMS["W4A16" if name == "experts" else name]
    files.save_form(tmp_path / "model", form, (files.MOE if name == "experts" else files.CONFIG) | WIDE)
    expected, kinds = run_files(None, tmp_path / "model")
    assert any(kinds.values()) == form.is_kept
    for states, own_kinds in ranks.run(2, run_files, tmp_path / "model"):
        assert own_kinds == kinds
        assert torch.equal(states["tokens"], expected["tokens"])
        assert (states["logits"] - expected["logits"]).abs().max() <= 1e-5 * expected["logits"].abs().max()


def run_gguf(group: RankGroup | None) -> Any:
    config = gguf.QWEN3 | {"intermediate_size": 128}
    model = build_model(config, dtype=torch.float32, device="cpu")
    if group is not None:
        model.shard(group)
    with mock.patch("outrider.formats.gguf.kept_bits_are_fast", lambda: True):
        declare_formats(model, lambda name: StoredFormat(gguf.kind_of(name, gguf.MIXED)))
        load_weights(model, gguf.stored(config, gguf.MIXED))
    text = Text(model)
    assert all(slot.kind for name, slot in model.weights().items() if "proj.weight" in name)
    return text.logits(text.add(PROMPT))


@pytest.mark.skipif(not native.available(), reason="bits of GGUF files need the native kernels")
def test_ranks_keep_the_bits_of_a_gguf_file(ranks: RankPool) -> None:
    expected = run_gguf(None)
    for logits in ranks.run(2, run_gguf):
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_groups_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    """Four heads of 32 are one group of 128 inputs; their numbers would be sharded."""
    files.save_form(tmp_path / "model", files.FORMS["fp8 blocks"])
    source = resolve(tmp_path / "model")
    words = ("model.layers.0.self_attn.o_proj: its quantisation groups .fp8. cannot be split evenly over 2 ranks: "
             "use a tensor_parallel_size of 1, or set keep_quantized=False")
    with pytest.raises(ValueError, match=words):
        load_model(source, dtype=torch.float32, device="cpu", keep_quantized=True, group=UnsummedRanks(0, 2))
    load_model(source, dtype=torch.float32, device="cpu", group=UnsummedRanks(0, 2))


def run_coded(group: RankGroup | None, quantization: str) -> Any:
    """Numbers that are coded at load."""
    model = build_model(files.CONFIG | {"intermediate_size": 224}, dtype=torch.float64, device="cpu")
    if group is not None:
        model.shard(group)
    declare_formats(model, lambda name: None, quantization=quantization)
    load_weights(model, files.plain_weights(files.CONFIG | {"intermediate_size": 224}).items())
    scales = {name: slot.shape for name, slot in model.weights().items() if name.endswith("weight_scale")}
    return states_of(model, PROMPT, 6), scales


def test_numbers_are_coded_in_groups_that_ranks_can_hold(ranks: RankPool) -> None:
    """fp8 has one scale for an output, so the codes are those of one rank. Half of 224 inputs are no whole groups of
    32: int4 leaves that layer its numbers."""
    expected, scales = run_coded(None, "fp8")
    for states, own_scales in ranks.run(2, run_coded, "fp8"):
        assert own_scales == scales
        assert (states["logits"] - expected["logits"]).abs().max() <= 1e-5 * expected["logits"].abs().max()
    _, scales = run_coded(None, "int4")
    (_, own_scales), _ = ranks.run(2, run_coded, "int4")
    down = "model.layers.0.mlp.down_proj.weight_scale"
    assert scales[down] == (128, 7) and down not in own_scales and down.replace("down", "up") in own_scales


def run_dummy(group: RankGroup | None, family: str) -> Any:
    model = build_model(config_of(family), dtype=torch.float64, device="cpu")
    if group is not None:
        model.shard(group)
    load_dummy(model, seed=3)
    return states_of(model, PROMPT, 1)["logits"]


def test_dummy_weights_are_parts_of_those_of_one_rank(ranks: RankPool) -> None:
    expected = run_dummy(None, "nemotron_h")
    for logits in ranks.run(4, run_dummy, "nemotron_h"):
        assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize(("count", "scales"), [(2, [(0.5, 1.0), (2.0, 4.0)]), (4, [(0.5, 1.0)] * 2 + [(2.0, 4.0)] * 2)])
def test_a_rank_takes_the_cache_scales_of_its_heads(count: int, scales: list[tuple[float, float]], tmp_path: Path
                                                    ) -> None:
    """Two kv heads; with four ranks each is on two of them."""
    values = {"k_scale": [0.5, 2.0], "v_scale": [1.0, 4.0]}
    save_file({f"model.layers.1.self_attn.{name}": torch.tensor(own) for name, own in values.items()},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for rank in range(count):
        outline = build_model(config_of("llama"), dtype=torch.float32, device="meta")
        outline.shard(UnsummedRanks(rank, count))
        found = find_cache_scales(EngineConfig("m", kv_cache_dtype="fp8"), resolve(tmp_path), outline)
        assert found == {1: ((scales[rank][0],), (scales[rank][1],))}


def test_names_of_version_0_1_are_taken_or_say_what_to_write() -> None:
    with pytest.warns(FutureWarning, match="InputCut is called InputShard now"):
        assert formats.InputCut is formats.InputShard
    with pytest.raises(TypeError, match="Old.cut: the method is called shard now"):
        type("Old", (Module,), {"cut": Module.shard})
