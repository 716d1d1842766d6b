"""ImageEncoder: encodes the images of prompts for the steps that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from outrider.core.input_part import InputPart
from outrider.features.images.kept import KeptFeatures
from outrider.features.images.part import ImageInputs, PlacedImage
from outrider.formats import WeightSlot
from outrider.kernels.buffers import send
from outrider.layers.given_rows import PlacedVectors
from outrider.models.loader import Stored
from outrider.models.vision.base import ImageFeatures, VisionTower
from outrider.runner.input_encoder import InputEncoder

KEPT_TOKENS = 8192  # of encoded images that are kept on the device for later steps; one image may have more


class ImageEncoder(InputEncoder):
    """Encodes images one by one, so that an image's features have the same bits whatever else is computed. Features are
    kept, since steps may compute parts of an image, and requests may have the same one."""

    def __init__(self, make_tower: Callable[[], VisionTower], device: torch.device,
                 kept_tokens: int = KEPT_TOKENS) -> None:
        self._make_tower, self._device = make_tower, device
        self._kept = KeptFeatures(kept_tokens)
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
                rows.append([self._on_device(own[at]) for own in (found.features, *found.deepstack)])
        values, *added = (torch.cat(own) for own in zip(*rows, strict=True))
        return PlacedVectors(np.concatenate(positions), values, tuple(added))

    def expect(self, needed: Sequence[tuple[InputPart, int]]) -> None:
        self._kept.expect({image.digest for part, start in needed if isinstance(part, ImageInputs)
                           for image in part.images if image.end > start})

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
        return self._kept.get(image.digest) or self._kept.add(image.digest, image.grid.num_tokens,
                                                              lambda: self._encode(image))

    def _encode(self, image: PlacedImage) -> ImageFeatures:
        self.num_encoded += 1
        return self.tower.encode(torch.from_numpy(image.patches).to(self._device), image.grid)

    def _on_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if rows.device.type == self._device.type else send(rows, self._device)
