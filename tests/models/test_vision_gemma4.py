"""The image parts of Gemma 4 against transformers, with and without a tower."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from outrider.models.sources import resolve
from outrider.models.vision.base import ImageFeatures, VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.levels import unit_levels
from outrider.models.vision.towers import load_tower
from tests.models.vision import made_patches, save_vision, vision_model

NAMES = ("gemma4_unified", "gemma4_clipped", "gemma4_standardized")
GRIDS = [(1, 1), (1, 7), (5, 1), (3, 4), (6, 9)]  # rows and columns of tokens
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda name: save_vision(name, root / name))


@pytest.fixture(scope="module")
def theirs() -> Callable[[str], Any]:
    return cache(vision_model)


def tower_of(folder: Path, dtype: torch.dtype) -> VisionTower:
    return load_tower(resolve(str(folder)), dtype=dtype, device="cpu")


def patches_of(name: str, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of an image, and the positions that transformers wants beside them."""
    is_unified = name == "gemma4_unified"
    per_side = 1 if is_unified else 3
    high, wide = rows * per_side, cols * per_side
    patches = torch.from_numpy(made_patches(high * wide, 432 if is_unified else 48, seed=rows * 10 + cols))
    ys, xs = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    return patches, torch.stack([xs.flatten(), ys.flatten()], dim=1)


@torch.no_grad()
def assert_same_features(name: str, model: Any, tower: VisionTower, dtype: torch.dtype) -> None:
    for rows, cols in GRIDS:
        patches, positions = patches_of(name, rows, cols)
        pixels = torch.from_numpy(unit_levels())[patches.long()].to(dtype)[None]
        expected = model.get_image_features(pixels, positions[None]).pooler_output
        expected = expected[0] if isinstance(expected, tuple | list) else expected
        made = tower.encode(patches, ImageGrid(rows * cols, rows, cols, rows * 12, cols * 12))
        assert isinstance(made, ImageFeatures) and made.deepstack == () and made.features.dtype == dtype
        torch.testing.assert_close(made.features, expected.reshape(rows * cols, -1), atol=1e-5, rtol=1e-5)
        assert made.features.std() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_features_equal_those_of_transformers(name: str, folder_of: Folders, theirs: Callable[[str], Any]) -> None:
    assert_same_features(name, theirs(name), tower_of(folder_of(name), torch.float32), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_features_in_float64_equal_those_of_transformers(name: str, folder_of: Folders) -> None:
    assert_same_features(name, vision_model(name).double(), tower_of(folder_of(name), torch.float64), torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_in_a_long_batch_of_transformers_is_padded_and_equal(
    name: str, folder_of: Folders, theirs: Callable[[str], Any]
) -> None:
    tower, (patches, positions) = tower_of(folder_of(name), torch.float32), patches_of(name, 2, 3)
    padding = 9 * (1 if name == "gemma4_unified" else 9)
    pixels = torch.nn.functional.pad(torch.from_numpy(unit_levels())[patches.long()], (0, 0, 0, padding))
    positions = torch.nn.functional.pad(positions, (0, 0, 0, padding), value=-1)
    with torch.no_grad():
        expected = theirs(name).get_image_features(pixels[None], positions[None]).pooler_output
    expected = expected[0] if isinstance(expected, tuple | list) else expected
    made = tower.encode(patches, ImageGrid(6, 2, 3, 24, 36)).features
    torch.testing.assert_close(made, expected.reshape(6, -1), atol=1e-5, rtol=1e-5)
