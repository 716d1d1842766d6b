"""ImagesOnDevice: the worker's part of images. It loads the model's vision tower when the first image comes, and
encodes images for the steps that need them."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.input_part import InputPart
from outrider.core.media_limits import most_images
from outrider.drafters.base import Drafter
from outrider.features.images.model_limits import SeeingLimits, read_processor_config
from outrider.features.images.part import GridImages, ImageInputs, PlacedImage, TwoWayImages
from outrider.formats import WeightSlot
from outrider.layers.given_rows import PlacedVectors
from outrider.mixers.paged.masks import RangeReach
from outrider.models.base import Model
from outrider.models.loader import Stored
from outrider.models.sources import resolve
from outrider.models.vision.base import ImageFeatures, VisionTower
from outrider.models.vision.towers import build_tower, fill_tower
from outrider.runner.input_encoder import InputEncoder
from outrider.runner.memory import FeatureBytes
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature

log = logging.getLogger("outrider")
KEPT_TOKENS = 8192  # of encoded images that are kept for later steps; one image may have more


class ImagesOnDevice(WorkerFeature):
    name = "images"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        processor = read_processor_config(Path(model.file_name).parent)
        most = most_images(self._config.limit_mm_per_prompt or {})
        own = SeeingLimits(part_type_of(model).__name__, most, model.placeholders, json.dumps(dict(model.file_values)),
                           json.dumps(processor))
        return replace(limits, parts=(*limits.parts, own))

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        """Return the bytes of the tower's weights, whether it is loaded at start or later, and of the features that are
        kept."""
        outline = build_tower(model.file_values, dtype=model.dtype, device="meta", source=model.file_name)
        kept = KEPT_TOKENS * model.hidden_size * model.dtype.itemsize
        return FeatureBytes(later=outline.weight_bytes + kept)

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        encoder = ImageEncoder(lambda: load_tower(self._config, model), model.device)
        if self._config.limit_mm_per_prompt is not None:  # images are asked for: no request shall wait for the tower
            encoder.tower  # noqa: B018
        step.state.params.inputs.encoders[ImageInputs] = encoder


def part_type_of(model: Model) -> type[ImageInputs]:
    """Return the class of request part (`InputPart`) that holds the images of this model's prompts."""
    if model.has_component_ropes:
        return GridImages
    reaches = {getattr(layer, "reach", RangeReach.WHOLE) for layer in model.attention_layers}
    return TwoWayImages if RangeReach.WINDOW in reaches else ImageInputs


def load_tower(config: EngineConfig, model: Model) -> VisionTower:
    source = resolve(config.model, config.revision, download_dir=config.download_dir)
    log.info("loading the vision tower of %s", config.model)
    tower = build_tower(model.file_values, dtype=model.dtype, device=model.device, source=model.file_name)
    fill_tower(tower, source, load_format=config.load_format, seed=config.seed)
    return tower


class ImageEncoder(InputEncoder):
    """Encodes images one at a time, so that an image's features have the same bits in every batch. The latest features
    are kept, because several steps may compute parts of one image, and several requests may have the same image."""

    def __init__(self, make_tower: Callable[[], VisionTower], device: torch.device,
                 kept_tokens: int = KEPT_TOKENS) -> None:
        self._make_tower, self._device, self._room = make_tower, device, kept_tokens
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()  # by digest, the latest last
        self._is_updated = False  # whether the tower's weights are, or may be, others than those of the files
        self.num_encoded = 0

    @cached_property
    def tower(self) -> VisionTower:
        with torch.inference_mode(False), torch.no_grad():  # updates could not change an inference tensor
            return self._make_tower()

    @torch.inference_mode()
    def encode(self, part: InputPart, start: int, end: int) -> PlacedVectors:
        assert isinstance(part, ImageInputs)
        positions, rows = [], []
        for image in part.images:
            first, last = max(start, image.offset), min(end, image.end)
            if first < last:
                found, at = self._features(image), slice(first - image.offset, last - image.offset)
                positions.append(np.arange(first, last, dtype=np.int64))
                rows.append([own[at] for own in (found.features, *found.deepstack)])
        values, *added = (torch.cat(own) for own in zip(*rows, strict=True))
        return PlacedVectors(np.concatenate(positions), values, tuple(added))

    def owns(self, name: str) -> bool:
        return not self.tower.ignores(name)

    def weights(self) -> Mapping[str, WeightSlot]:
        return self.tower.weights()

    def arrivals(self, name: str, tensor: Stored) -> Iterable[tuple[str, Stored]]:
        self._is_updated = True
        return [(self.tower.slot_name(own), kept) for own, kept in self.tower.arrivals([(name, tensor)])]

    def finalize(self) -> None:
        self._kept.clear()
        if self._is_updated:
            self.tower.finalize()

    def drop_updated(self) -> None:
        self._kept.clear()
        if self._is_updated:
            del self.tower
        self._is_updated = False

    def _features(self, image: PlacedImage) -> ImageFeatures:
        if image.digest not in self._kept:
            patches = torch.from_numpy(image.patches).to(self._device)
            self._kept[image.digest] = self.tower.encode(patches, image.grid)
            self.num_encoded += 1
        self._kept.move_to_end(image.digest)
        while len(self._kept) > 1 and sum(len(own.features) for own in self._kept.values()) > self._room:
            self._kept.popitem(last=False)
        return self._kept[image.digest]
