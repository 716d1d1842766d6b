"""Building and loading towers: every tensor of a checkpoint is taken once, and what does not fit is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from outrider.models.config import ConfigError
from outrider.models.loader import load_weights
from outrider.models.sources import resolve
from outrider.models.sources.model_source import WeightError
from outrider.models.vision import parts, towers
from outrider.models.vision.base import VisionTower
from outrider.models.vision.gemma4 import BOUNDS
from outrider.models.vision.gemma4_unified import Gemma4TileEmbedder
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.towers import build_tower, fill_tower, load_tower, register_tower, tower_types
from tests.models.vision import VISION_MODELS, made_patches, save_vision

ALL = pytest.mark.parametrize("name", VISION_MODELS)
LANGUAGE = ("model.language_model.", "lm_head.")
Folders = Callable[[str], Path]
SMALL_TEXT = {"hidden_size": 64}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda name: save_vision(name, root / name))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(resolve(str(folder)).config)


def outline(config: dict[str, Any]) -> VisionTower:
    return build_tower(config, dtype=torch.float32, device="meta")


@dataclass(frozen=True)
class ListedSource:
    """A source of tensors in memory, which counts those that are taken."""

    tensors: dict[str, torch.Tensor]
    path: Path = Path("listed")

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def fill(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> VisionTower:
    tower = build_tower(config_of(folder), dtype=dtype, device="cpu")
    fill_tower(tower, ListedSource(tensors))  # type: ignore[arg-type]
    return tower


@ALL
def test_every_tensor_beside_the_language_model_is_taken_once(name: str, folder_of: Folders) -> None:
    saved = load_file(folder_of(name) / "model.safetensors")
    vision = {key: tensor for key, tensor in saved.items() if not key.startswith(LANGUAGE)}
    tower = build_tower(config_of(folder_of(name)), dtype=torch.float32, device="cpu")
    slots = tower.weights()
    assert slots.keys() == vision.keys() and len({id(slot.target) for slot in slots.values()}) == len(slots)
    assert Counter(key for key, _ in tower.arrivals(saved.items())) == Counter(vision.keys())
    loadable: Any = tower
    load_weights(loadable, tower.arrivals(saved.items()))
    assert all(torch.equal(slots[key].target, tensor) for key, tensor in vision.items())


@ALL
def test_missing_and_unknown_tensors_are_named(name: str, folder_of: Folders) -> None:
    saved = load_file(folder_of(name) / "model.safetensors")
    own = sorted(key for key in saved if not key.startswith(LANGUAGE))
    with pytest.raises(WeightError, match=f"missing: {own[0]}"):
        fill(folder_of(name), {key: tensor for key, tensor in saved.items() if key != own[0]})
    with pytest.raises(WeightError, match=f"left over: {own[0]}.more"):
        fill(folder_of(name), saved | {f"{own[0]}.more": torch.zeros(1)})
    with pytest.raises(WeightError, match=own[-1]):
        fill(folder_of(name), saved | {own[-1]: saved[own[-1]].flatten()[:-1]})


def test_tables_of_embeddings_and_frequencies_are_passed_over(folder_of: Folders) -> None:
    for name in ("gemma4_unified", "gemma4_clipped"):
        saved = load_file(folder_of(name) / "model.safetensors")
        fill(folder_of(name), saved | {"model.embed_vision.embedding.weight": torch.zeros(4, 48)})
    fill(folder_of(name), saved | {"model.vision_tower.encoder.rotary_emb.inv_freq": torch.zeros(4)})


def test_clips_are_not_dropped(folder_of: Folders) -> None:
    saved = load_file(folder_of("gemma4_clipped") / "model.safetensors")
    config = config_of(folder_of("gemma4_clipped"))
    config = config | {"vision_config": config["vision_config"] | {"use_clipped_linears": False}}
    tower = build_tower(config, dtype=torch.float32, device="cpu")
    with pytest.raises(WeightError, match="left over: .*input_max"):
        fill_tower(tower, ListedSource(saved))  # type: ignore[arg-type]


def test_infinite_clips_limit_nothing(folder_of: Folders) -> None:
    saved = load_file(folder_of("gemma4_clipped") / "model.safetensors")
    infinite = {key: torch.tensor(torch.inf if key.endswith("max") else -torch.inf)
                for key in saved if key.endswith(BOUNDS)}
    patches, grid = torch.from_numpy(made_patches(36, 48, seed=1)), ImageGrid(4, 2, 2, 24, 24)
    wide = {key: torch.tensor(1e9 if key.endswith("max") else -1e9) for key in infinite}
    made = [fill(folder_of("gemma4_clipped"), saved | given).encode(patches, grid).features
            for given in (infinite, wide, {})]
    assert torch.equal(made[0], made[1]) and not torch.allclose(made[0], made[2], atol=1e-2)
    bad = {next(iter(infinite)): torch.tensor(torch.nan)}
    with pytest.raises(WeightError, match="NaN"):
        fill(folder_of("gemma4_clipped"), saved | bad)


@ALL
def test_attention_in_pieces_gives_the_same_features(
    name: str, folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = load_tower(resolve(str(folder_of(name))), dtype=torch.float64, device="cpu")
    patches, grid = patches_for(tower, 3, 4)
    whole = tower.encode(patches, grid)
    again = tower.encode(patches, grid)
    monkeypatch.setattr(parts, "MOST_SCORES", 700)
    monkeypatch.setattr(parts, "MOST_NUMBERS", 1000)
    pieces = tower.encode(patches, grid)
    for one, same, other in zip((whole.features, *whole.deepstack), (again.features, *again.deepstack),
                                (pieces.features, *pieces.deepstack), strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def patches_for(tower: VisionTower, rows: int, cols: int) -> tuple[torch.Tensor, ImageGrid]:
    if isinstance(tower, Gemma4TileEmbedder):
        count, size, side = rows * cols, 432, 12
    else:
        side = 12 if "gemma" in type(tower).__name__.lower() else 8
        count, size = rows * cols * (side // 4) ** 2, 48
    return (torch.from_numpy(made_patches(count, size, seed=5)),
            ImageGrid(rows * cols, rows, cols, rows * side, cols * side))


@ALL
def test_dummy_weights_and_outlines(name: str, folder_of: Folders) -> None:
    source = resolve(str(folder_of(name)))
    made = [load_tower(source, dtype=torch.float32, device="cpu", load_format="dummy", seed=3) for _ in range(2)]
    patches, grid = patches_for(made[0], 2, 2)
    features = [tower.encode(patches, grid).features for tower in made]
    assert features[0].shape == (4, 64) and torch.equal(*features) and features[0].isfinite().all()
    empty = load_tower(source, dtype=torch.float32, device="meta")
    assert empty.weight_bytes == made[0].weight_bytes > 0
    assert empty.encode(patches.to("meta"), grid).features.shape == (4, 64)


# Millions of parameters, counted in the published files with the projection to the language model.
@pytest.mark.parametrize(("kind", "text", "vision", "millions"), [
    ("gemma4_unified", 3840, {}, 50),
    ("gemma4", 2560, {"use_clipped_linears": True}, 169),
    ("gemma4", 5376, {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
                      "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True}, 576),
    ("qwen3_5", 4096, {}, 456),
    ("qwen3_5", 1024, {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}, 101),
])
def test_published_sizes(kind: str, text: int, vision: dict[str, Any], millions: int) -> None:
    config = {"model_type": kind, "text_config": {"hidden_size": text},
              "vision_config": {"model_type": f"{kind}_vision", **vision}}
    tower = build_tower(config, dtype=torch.bfloat16, device="meta")
    assert round(sum(slot.target.numel() for slot in tower.weights().values()) / 1e6) == millions


@pytest.mark.parametrize(("kind", "vision", "said"), [
    ("gemma4", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ("gemma4", {"num_attention_heads": 4, "num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("gemma4", {"head_dim": 10}, "head_dim=10"),
    ("gemma4", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
    ("gemma4", {"window": 7}, "vision_config: window=7"),
    ("gemma4_unified", {"output_proj_dims": 32}, "output_proj_dims=32"),
    ("gemma4_unified", {"model_patch_size": 32}, "model_patch_size=32"),
    ("qwen3_5", {"out_hidden_size": 63}, "out_hidden_size=63"),
    ("qwen3_5", {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"),
    ("qwen3_5", {"num_position_embeddings": 35}, "num_position_embeddings=35"),
    ("qwen3_5", {"hidden_size": 50}, "num_heads"),
    ("qwen3_vl", {"deepstack_visual_indexes": [27]}, "deepstack_visual_indexes"),
    ("qwen3_vl", {"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
    ("llava", {}, "model_type='llava'"),
])
def test_configs_that_are_not_served_are_named(kind: str, vision: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        outline({"model_type": kind, "text_config": SMALL_TEXT, "vision_config": vision})


def test_a_model_without_vision_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="vision_config"):
        outline({"model_type": "gemma4", "text_config": SMALL_TEXT, "vision_config": None})


def test_a_tower_from_outside_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(towers, "_TOWERS", dict(towers._TOWERS))
    register_tower("gemma9", Gemma4TileEmbedder)
    assert "gemma9" in tower_types()
    made = outline({"model_type": "gemma9", "text_config": SMALL_TEXT, "vision_config": {"patch_size": 4}})
    assert isinstance(made, Gemma4TileEmbedder)
