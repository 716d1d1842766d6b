"""The module of GLM-4.5 that predicts further tokens, against transformers' own layer, and in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SpeculativeConfig
from outrider.drafters.base import DraftBuild
from outrider.drafters.mtp import mtp_drafter
from outrider.models.config import ConfigError
from outrider.models.mtp import describe_mtp
from tests.engine.harness import Ask, Rig, greedy, prompt_of
from tests.engine.harness import tokens_of as texts_of
from tests.models.oracle import hf_model, load, make_folder
from tests.models.prediction_modules import assert_drafts_equal
from tests.models.test_oracle import edit_config

NUM_LAYERS, H = 4, 64
MODULE = f"model.layers.{NUM_LAYERS}"


def make_checkpoint(folder: Path) -> tuple[Path, Any]:
    """A folder whose fifth layer is the module, and transformers' model of five layers."""
    make_folder("glm4_moe", folder, num_hidden_layers=NUM_LAYERS + 1)
    model = hf_model(folder)
    generator = torch.Generator().manual_seed(3)
    shapes = {"enorm": (H,), "hnorm": (H,), "shared_head.norm": (H,), "eh_proj": (H, 2 * H)}
    own = {f"{MODULE}.{name}.weight": torch.empty(shape).normal_("norm" in name, 0.2, generator=generator)
           for name, shape in shapes.items()}
    path = folder / "model.safetensors"
    save_file(load_file(path) | own, path)
    edit_config(folder, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1)
    return folder, (model, own)


def naive_drafts(reference: Any, known: Sequence[int], k: int) -> tuple[list[int], torch.Tensor]:
    """k drafts after `known`, everything computed anew for each."""
    model, own = reference
    weight = {name.removeprefix(f"{MODULE}.").removesuffix(".weight"): tensor for name, tensor in own.items()}
    inner, eps = model.model, model.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight[name]

    def positions(count: int) -> tuple[torch.Tensor, Any]:
        ids = torch.arange(count)[None]
        return ids, inner.rotary_emb(torch.zeros(1, count, H), ids)

    def layers(x: torch.Tensor, chosen: Any) -> torch.Tensor:
        ids, angles = positions(x.shape[1])
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        for layer in chosen:
            x = layer(x, attention_mask=mask, position_ids=ids, position_embeddings=angles)
        return x

    embed = inner.embed_tokens.weight
    hidden = inner.norm(layers(embed[known[:-1]][None], inner.layers[:NUM_LAYERS]))
    chosen: list[int] = []
    logits = []
    for _ in range(k):
        embedded = embed[[*known, *chosen][1:]].clone()
        embedded[0] = 0  # the makers' code has no embedding at position 0
        joined = torch.cat((norm(embedded, "enorm")[None], norm(hidden, "hnorm")), dim=-1)
        output = norm(layers(joined @ weight["eh_proj"].T, inner.layers[NUM_LAYERS:]), "shared_head.norm")
        logits.append(output[0, -1] @ model.lm_head.weight.T)
        chosen.append(int(logits[-1].argmax()))
        hidden = torch.cat((hidden, output[:, -1:]), dim=1)
    return chosen, torch.stack(logits)


@torch.no_grad()
def test_drafts_equal_a_naive_reference(tmp_path: Path) -> None:
    folder, reference = make_checkpoint(tmp_path)
    target = load(folder, torch.float64)
    naive = partial(naive_drafts, reference)
    assert_drafts_equal(folder, target, naive, within=1e-3)  # theirs are in float32


@torch.inference_mode()
def test_an_engine_says_the_same_with_the_module(tmp_path: Path) -> None:
    """In float64, in chunks, after preemptions and prefix hits."""
    folder, _ = make_checkpoint(tmp_path)
    target = load(folder, torch.float64)
    asks = [Ask(prompt_of(seed, count), greedy(24, ignore_eos=True)) for seed, count in ((1, 45), (2, 7), (3, 30))]
    with Rig(target) as plain:
        expected = texts_of(plain.run(asks))
    build = DraftBuild(target, torch.float64, torch.device("cpu"), max_len=96, target_source=str(folder))
    drafter = mtp_drafter(SpeculativeConfig(method="mtp", num_speculative_tokens=3), build)
    with Rig(target, drafter=drafter, max_num_batched_tokens=24) as rig:
        assert texts_of(rig.run(asks, after_step=rig.preempt)) == texts_of(rig.run(asks)) == expected
        assert rig.scheduler.stats.num_preemptions > 0 and rig.scheduler.cache.stats.hit_tokens > 0
        assert sum(part.num_drafted for result in rig.results for part in result.requests) > 20


def test_a_checkpoint_without_a_module_is_refused(tmp_path: Path) -> None:
    for family in ("glm4_moe", "deepseek_v2_lite"):
        target = load(make_folder(family, tmp_path / family))
        with pytest.raises(ConfigError, match="has no multi-token-prediction module"):
            describe_mtp(target)
