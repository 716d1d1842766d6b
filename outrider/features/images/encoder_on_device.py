"""ImagesOnDevice: the worker's part of images. It plans their memory, and loads the model's vision tower at the start
or when the first image comes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.background_work import BackgroundWork
from outrider.core.media_limits import image_size, most_images
from outrider.drafters.base import Drafter
from outrider.features.images.encoder import KEPT_TOKENS, ImageEncoder
from outrider.features.images.model_limits import SeeingLimits, read_processor_config
from outrider.features.images.part import GridImages, ImageInputs, TwoWayImages
from outrider.features.images.working_memory import longest_image, tower_room
from outrider.mixers.paged.masks import RangeReach
from outrider.models.base import Model
from outrider.models.sources import resolve
from outrider.models.vision.base import VisionTower
from outrider.models.vision.towers import build_tower, fill_tower
from outrider.runner.memory import FeatureBytes
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature

log = logging.getLogger("outrider")
STEP_COPIES = 3  # of the vectors of a step's tokens: as they are encoded, for the step, and for its drafter


class ImagesOnDevice(WorkerFeature):
    name = "images"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._encoder: ImageEncoder | None = None  # of the last step that was made, which is the one that serves

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        processor = read_processor_config(Path(model.file_name))
        given = self._config.limit_mm_per_prompt or {}
        longest = min(limits.max_len, longest_image(model, processor, image_size(given)))
        own = SeeingLimits(part_type_of(model).__name__, most_images(given), longest, model.placeholders,
                           json.dumps(dict(model.file_values)), json.dumps(processor))
        return replace(limits, parts=(*limits.parts, own))

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        """The tower's weights, whether it is loaded at start or later, the images that are kept, and what encoding the
        longest image takes."""
        own = limits.part(SeeingLimits)
        assert own is not None
        if own.longest == 0:  # every image will be refused
            return FeatureBytes()
        room = tower_room(own.model_config, model.dtype, model.file_name, own.longest)
        tokens = KEPT_TOKENS + STEP_COPIES * limits.max_batched_tokens
        encoding = 0 if model.device.type == "cpu" else room.encoding_bytes  # the host's memory is not divided up
        return FeatureBytes(later=room.weight_bytes + encoding + tokens * room.token_bytes)

    def background(self) -> BackgroundWork:
        return _LoadsAtStart(self) if self._config.limit_mm_per_prompt is not None else super().background()

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        self._encoder = ImageEncoder(lambda: load_tower(self._config, model), model.device)
        step.state.params.inputs.encoders[ImageInputs] = self._encoder

    def load(self) -> None:
        if self._encoder is not None:
            self._encoder.tower  # noqa: B018


class _LoadsAtStart(BackgroundWork):
    """Loads the tower when the worker is ready: images are asked for, so no request shall wait for it."""

    def __init__(self, feature: ImagesOnDevice) -> None:
        self._feature = feature

    def start(self) -> None:
        self._feature.load()


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
