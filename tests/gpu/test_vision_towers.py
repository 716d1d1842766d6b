"""Vision towers of published widths on the card, with random weights and few layers: bf16 against float32 on the CPU,
equal bits each time, and memory that grows no faster than the image."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider.features.images.working_memory import encoding_bytes
from outrider.models.vision.base import VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.towers import build_tower
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import CPU, DEVICE

pytestmark = pytest.mark.together("vision")
DTYPE = torch.bfloat16 if HAS_CARD else torch.float32
WIDE = {"hidden_size": 1152, "intermediate_size": 4304}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72}
# model type -> (bytes of a patch, patches of a token on a side, vision config)
TOWERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gemma4_unified": (6912, 1, {"mm_embed_dim": 256, "output_proj_dims": 256}),
    "gemma4": (768, 3, WIDE | HEADS | {"num_hidden_layers": 2, "standardize": True}),
    "qwen3_vl": (768, 2, WIDE | {"depth": 2, "num_heads": 16, "deepstack_visual_indexes": [0]}),
}
ALL = pytest.mark.parametrize("kind", TOWERS)


@cache
def towers(kind: str) -> tuple[VisionTower, VisionTower, VisionTower]:
    """A tower on the card, and on the CPU one in float32 and one in the card's dtype, all with the same numbers."""
    config = {"model_type": kind, "text_config": {"hidden_size": 256}, "vision_config": TOWERS[kind][2]}
    made = [build_tower(config, dtype=dtype, device=device)
            for dtype, device in ((DTYPE, DEVICE), (torch.float32, CPU), (DTYPE, CPU))]
    generator = torch.Generator().manual_seed(7)
    own, third = made[0].weights(), made[2].weights()
    for name, slot in made[1].weights().items():
        is_scale = slot.target.dim() == 1 and "bias" not in name
        slot.target.normal_(std=0.2 if slot.target.dim() < 2 else slot.target[0].numel() ** -0.5, generator=generator)
        own[name].target.copy_(slot.target.add_(1.0 if is_scale else 0.0))
        slot.target.copy_(own[name].target)  # as bf16 rounds it
        third[name].target.copy_(slot.target)
    for tower in made:
        tower.finalize()
    return made[0], made[1], made[2]


def image(kind: str, rows: int, cols: int) -> tuple[torch.Tensor, ImageGrid]:
    size, per_side, _ = TOWERS[kind]
    draw = np.random.default_rng(rows * 1000 + cols)
    patches = torch.from_numpy(draw.integers(0, 256, (rows * cols * per_side**2, size), dtype=np.uint8))
    return patches, ImageGrid(rows * cols, rows, cols, 48 * rows, 48 * cols)


def error_of(made: torch.Tensor, expected: torch.Tensor) -> float:
    """How far features are from others, relative to their size."""
    difference = made.float().cpu() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


@ALL
@torch.inference_mode()
def test_features_on_the_card_are_those_of_the_cpu(kind: str) -> None:
    ours, plain, on_cpu = towers(kind)
    for rows, cols in ((1, 1), (3, 5), (9, 8)):
        patches, grid = image(kind, rows, cols)
        made, expected = ours.encode(patches.to(DEVICE), grid), plain.encode(patches, grid)
        again = ours.encode(patches.to(DEVICE), grid)
        assert len(made.deepstack) == len(expected.deepstack) == (kind == "qwen3_vl")
        rounded = on_cpu.encode(patches, grid)
        for one, same, other, usual in zip(*((each.features, *each.deepstack)
                                             for each in (made, again, expected, rounded)), strict=True):
            assert torch.equal(one, same)
            assert error_of(one, other) < 1.2 * error_of(usual, other) + 1e-3, f"{rows} x {cols}"


@pytest.mark.gpu
@torch.inference_mode()
def test_memory_grows_no_faster_than_the_image() -> None:
    """Attention must not keep its scores: those of the larger image would take 70 GiB."""
    tower, *_ = towers("qwen3_vl")
    peaks = []
    for rows, cols in ((32, 32), (96, 128)):  # 1 and 12.6 megapixels
        patches, grid = image("qwen3_vl", rows, cols)
        patches = patches.to(DEVICE)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        tower.encode(patches, grid)
        peaks.append(torch.cuda.max_memory_allocated(DEVICE) - before)
    assert peaks[1] < 14 * peaks[0] + (64 << 20) and peaks[1] < 4 << 30
    config = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 256}, "vision_config": TOWERS["qwen3_vl"][2]}
    planned = encoding_bytes(build_tower(config, dtype=DTYPE, device="meta"), 96 * 128)
    assert peaks[1] <= planned + (64 << 20), "the plan of a GPU's memory has room for it"
