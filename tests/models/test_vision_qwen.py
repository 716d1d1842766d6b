"""The towers of Qwen3.5 and Qwen3-VL against transformers, with their deepstacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from outrider.models.sources import resolve
from outrider.models.vision.base import VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.levels import centered_levels
from outrider.models.vision.towers import load_tower
from tests.models.vision import made_patches, save_vision, vision_model

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
GRIDS = [(1, 1), (1, 7), (5, 1), (3, 4), (8, 6)]  # rows and columns of tokens
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda name: save_vision(name, root / name))


def tower_of(folder: Path, dtype: torch.dtype) -> VisionTower:
    return load_tower(resolve(str(folder)), dtype=dtype, device="cpu")


def pixels_of(patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The patches as transformers takes them: every frame twice."""
    numbers = torch.from_numpy(centered_levels())[patches.long()]
    return numbers.view(-1, 3, 1, 16).repeat(1, 1, 2, 1).flatten(1).to(dtype)


@torch.no_grad()
def assert_same_features(model: Any, tower: VisionTower, dtype: torch.dtype, num_deepstack: int) -> None:
    for rows, cols in GRIDS:
        patches = torch.from_numpy(made_patches(4 * rows * cols, 48, seed=rows * 10 + cols))
        theirs = model.get_image_features(pixels_of(patches, dtype), torch.tensor([[1, 2 * rows, 2 * cols]]))
        made = tower.encode(patches, ImageGrid(rows * cols, rows, cols, rows * 8, cols * 8))
        torch.testing.assert_close(made.features, theirs.pooler_output[0], atol=1e-5, rtol=1e-5)
        assert made.features.dtype == dtype and made.features.std() > 0.1
        assert len(made.deepstack) == num_deepstack
        for own, expected in zip(made.deepstack, getattr(theirs, "deepstack_features", None) or (), strict=True):
            torch.testing.assert_close(own, expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_features_equal_those_of_transformers(name: str, dtype: torch.dtype, folder_of: Folders) -> None:
    num_deepstack = 2 if name.startswith("qwen3_vl") else 0
    assert_same_features(vision_model(name).to(dtype), tower_of(folder_of(name), dtype), dtype, num_deepstack)
