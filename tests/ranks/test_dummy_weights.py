"""Random weights of a model without a checkpoint: each rank draws its part of those that one rank alone draws."""

from __future__ import annotations

import pytest
import torch

from outrider.formats.ranks import UnsummedRanks
from outrider.models.base import Model
from outrider.models.loader import load_dummy
from outrider.models.registry import build_model
from tests.models.classics import CLASSICS
from tests.models.oracle import HYBRID_FAMILIES, KDA_FAMILIES, LATENT_FAMILIES, POOLED_FAMILIES, STREAM_FAMILIES
from tests.ranks.families import config_of
from tests.ranks.test_families import DENSE, EXPERTS

COUNT = 2
FAMILIES = [*DENSE, *EXPERTS, *LATENT_FAMILIES, *HYBRID_FAMILIES, *KDA_FAMILIES, *STREAM_FAMILIES, *POOLED_FAMILIES,
            *CLASSICS]
# Packed matrices, heads in another order than the file's, transposed convolutions and experts.
QUICK = {"llama_bias", "qwen3_next", "nemotron_h", "kimi_linear", "gpt_oss", "deepseek_v3_direct", "cohere_normed"}


def build(family: str, rank: int | None) -> Model:
    model = build_model(config_of(family), dtype=torch.float32, device="cpu")
    if rank is not None:
        model.shard(UnsummedRanks(rank, COUNT))
    return model


def drawn_checkpoint(family: str) -> dict[str, torch.Tensor]:
    """The tensors that one rank draws, in the order of a checkpoint. A second model, whose slots are given the numbers
    of a tensor's elements, shows where each element lies."""
    model, numbered = build(family, None), build(family, None).weights()
    load_dummy(model, seed=5)
    tensors = {}
    for name, slot in model.weights().items():
        count = slot.target.numel()
        numbered[name].store(torch.arange(count, dtype=torch.float32).view(slot.shape))
        tensor = torch.empty(count, dtype=slot.target.dtype)
        tensor[numbered[name].target.flatten().long()] = slot.target.flatten()
        tensors[name] = tensor.view(slot.shape)
    return tensors


@pytest.mark.parametrize("family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.long)
                                    for family in FAMILIES])
def test_ranks_draw_their_part_of_the_weights_of_one_rank(family: str) -> None:
    tensors = drawn_checkpoint(family)
    for rank in range(COUNT):
        model, loaded = build(family, rank), build(family, rank).weights()
        load_dummy(model, seed=5)
        assert model.weights().keys() == tensors.keys()
        for name, slot in model.weights().items():
            loaded[name].store(tensors[name])
            assert torch.equal(slot.target, loaded[name].target), name
