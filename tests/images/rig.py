"""Engines in float64 around tiny models that see, on the CPU with every free page poisoned."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.config import EngineConfig
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.features.images import encoder_on_device
from outrider.features.images.encoder import ImageEncoder
from outrider.features.images.part import ImageInputs
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.models.vision.base import VisionTower
from outrider.models.vision.towers import build_tower, fill_tower
from tests.engine.harness import Rig, prompt_of
from tests.images.recipes import PROCESSOR_CONFIG, RECIPES


@functools.cache
def folder_of(family: str) -> Path:
    folder = RECIPES[family].save(Path(tempfile.mkdtemp(prefix="outrider-images-")) / family)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR_CONFIG[kind]))
    return folder


@functools.cache
def model_of(family: str) -> Model:
    return load_model(resolve(str(folder_of(family))), dtype=torch.float64, device="cpu")


@functools.cache
def tower_of(family: str) -> VisionTower:
    source = resolve(str(folder_of(family)))
    tower = build_tower(source.config, dtype=torch.float64, device="cpu")
    fill_tower(tower, source)
    return tower


@dataclass(frozen=True)
class Scene:
    """A prompt: texts, and images by seed and shape between them."""

    texts: tuple[tuple[int, int], ...]  # seed and length of each
    images: tuple[tuple[int, tuple[int, int]], ...]  # seed and shape of each; one less than texts
    params: SamplingParams

    def prompt(self, family: str) -> dict[str, Any]:
        recipe = RECIPES[family]
        ids: list[int] = []
        for index, (seed, length) in enumerate(self.texts):
            ids += [*(recipe.place if index else ()), *prompt_of(seed, length, 290)]
        images = [recipe.image(seed, shape) for seed, shape in self.images]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images} if images else None}


class ImageRig(Rig):
    """Counts how often images were encoded, and where requests were preempted."""

    def __init__(self, family: str, *, drafter: Drafter | None = None, **settings: Any) -> None:
        before = encoder_on_device.load_tower
        encoder_on_device.load_tower = lambda config, model: tower_of(family)  # type: ignore[assignment]
        try:
            super().__init__(model_of(family), drafter=drafter,
                             **{"attention_backend": "torch", "max_model_len": 160, "num_pages": 160} | settings)
        finally:
            encoder_on_device.load_tower = before
        self.family = family
        found = self.step.state.params.inputs.encoders[ImageInputs]
        assert isinstance(found, ImageEncoder)
        self.encoder = found
        self.encoder.__dict__["tower"] = tower_of(family)
        self.preempted_inside = 0

    def run_scenes(self, scenes: Sequence[Scene], after_step: Any = None) -> list[RequestOutput]:
        for index, scene in enumerate(scenes):
            request = self.engine.checks.check(scene.prompt(self.family), scene.params)
            self.engine.add({str(index): request})
            self.outputs._outputs[str(index)] = RequestOutput.empty(str(index), None, list(request.token_ids),
                                                                    scene.params)
        done: dict[str, RequestOutput] = {}
        while self.engine.has_work:
            done |= {output.request_id: output for output in self.outputs.step() if output.finished}
            if after_step is not None:
                after_step()
        self.assert_clean()
        return [done[str(index)] for index in range(len(scenes))]

    def preempt_inside(self) -> None:
        """Preempt every request once while its prompt is computed, inside an image where a family lets chunks end
        there."""
        for request in list(self.scheduler._running):
            at, parts = request.bound.at_most, request.input.input_parts
            images = [image for part in parts if isinstance(part, ImageInputs) for image in part.images]
            if request.stats.num_preemptions == 0 and images and images[0].offset < at < request.prompt_len:
                self.preempted_inside += any(image.offset < at < image.end for image in images)
                self.scheduler._preempt(request)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


__all__ = ["EngineConfig", "ImageRig", "Scene", "folder_of", "model_of", "same_bits", "tower_of"]
