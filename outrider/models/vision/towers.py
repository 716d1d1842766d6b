"""The tower of each model type, with the code that builds a tower and loads it from a model's files.

A tower is built and loaded without its language model, so it can wait until the first image comes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from outrider.models.config import ConfigReader
from outrider.models.loader import load_dummy, load_weights
from outrider.models.sources.model_source import ModelSource, WeightError
from outrider.models.vision.base import VisionTower

# By a config's `model_type`: "module:class" of this package, imported when it is needed.
_TOWERS: dict[str, type[VisionTower] | str] = {
    "gemma4": "gemma4:Gemma4Tower",
    "gemma4_unified": "gemma4_unified:Gemma4TileEmbedder",
    "qwen3_5": "qwen:QwenTower",
    "qwen3_5_moe": "qwen:QwenTower",
    "qwen3_vl": "qwen:Qwen3VLTower",
    "qwen3_vl_moe": "qwen:Qwen3VLTower",
}
# Keys of vision configs that change nothing in what a tower computes.
_PASSED_OVER = (
    "default_output_length", "num_soft_tokens", "global_head_dim", "max_position_embeddings", "image_size",
    "vision_use_head", "layer_norm_eps",
)


def tower_types() -> tuple[str, ...]:
    """Return every `model_type` whose images can be encoded."""
    return tuple(_TOWERS)


def register_tower(model_type: str, tower_class: type[VisionTower]) -> None:
    """Encode the images of models of this type with `tower_class` from now on."""
    _TOWERS[model_type] = tower_class


def build_tower(config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str,
                source: str = "config.json") -> VisionTower:
    """Build a tower without its weights; on the meta device it takes no memory. config: the whole model's. Raises a
    ConfigError that names an unsupported key."""
    reader = ConfigReader(config, source)
    kind = reader.get("model_type", str, "")
    if kind not in _TOWERS:
        raise reader.refusal("model_type", f"images are served for {', '.join(_TOWERS)}", "Send text alone.")
    vision = ConfigReader({"vision_config": reader.required("vision_config", dict)}, source)
    vision.section("vision_config").passes_over(*_PASSED_OVER)
    tower = _class_of(kind)(reader, vision.section("vision_config"), dtype=dtype, device=torch.device(device))
    vision.refuse_unread()
    return tower


def _class_of(kind: str) -> Any:
    found = _TOWERS[kind]
    if not isinstance(found, str):
        return found
    module, _, name = found.partition(":")
    return getattr(import_module(f"outrider.models.vision.{module}"), name)


def load_tower(source: ModelSource, *, dtype: torch.dtype, device: torch.device | str, load_format: str = "auto",
               seed: int = 0) -> VisionTower:
    """Load the tower of a model, ready to encode. Quantised weights are dequantised. load_format "dummy" draws the
    weights from `seed` and reads nothing."""
    tower = build_tower(source.config, dtype=dtype, device=device, source=str(source.config_file))
    fill_tower(tower, source, load_format=load_format, seed=seed)
    return tower


def fill_tower(tower: VisionTower, source: ModelSource, *, load_format: str = "auto", seed: int = 0) -> None:
    """Give a tower its weights. A tower on the meta device is not filled."""
    loadable: Any = tower  # the loader only uses methods of a model that a tower has too
    if tower.device.type == "meta":
        return
    if load_format == "dummy":
        return load_dummy(loadable, seed)
    try:
        load_weights(loadable, tower.arrivals(source.read()))
    except WeightError as error:
        raise error if str(source.path) in str(error) else WeightError(f"{source.path}: {error}") from None
