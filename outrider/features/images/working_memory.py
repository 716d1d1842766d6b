"""The device memory that images take. For what encoding takes, an outline of the tower encodes the longest image, and
the bytes of the tensors that live at the same time are counted."""

from __future__ import annotations

import json
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.features.images.preprocess.processor import ImageProcessor
from outrider.models.base import Model
from outrider.models.vision.base import ImageFeatures, VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.towers import build_tower


def longest_image(model: Model, processor_config: dict[str, Any] | None, size: tuple[int, int] | None) -> int:
    """The most tokens of an image. size: the width and height of the largest one; None: any. 0 if the processor's file
    is not served, which each request with images is told."""
    try:
        processor = ImageProcessor.from_config(dict(model.file_values), processor_config)
        if size is None:
            return processor.most_tokens()
        return processor.size_of(height=size[1], width=size[0]).num_tokens
    except ValueError:
        return 0


class TowerRoom(NamedTuple):
    """The memory that a tower takes."""

    weight_bytes: int
    encoding_bytes: int  # of the longest image
    token_bytes: int  # of a token's features


@lru_cache(16)
def tower_room(model_config: str, dtype: torch.dtype, source: str, longest: int) -> TowerRoom:
    """model_config: as JSON."""
    outline = build_tower(json.loads(model_config), dtype=dtype, device="meta", source=source)
    return TowerRoom(outline.weight_bytes, encoding_bytes(outline, max(1, longest)), token_bytes(outline))


def encoding_bytes(tower: VisionTower, num_tokens: int) -> int:
    """Return the most bytes that encoding an image of so many tokens takes, its features among them. tower: an outline
    on the meta device, where nothing is computed; it is shortened."""
    tower.shorten()
    tower.weights()  # some are made when they are asked for first
    rows = max(1, int(num_tokens**0.5))
    with torch.inference_mode(), LiveBytes() as live:
        _encode_anything(tower, rows, -(-num_tokens // rows))
    return live.peak


def token_bytes(tower: VisionTower) -> int:
    """Return the bytes of one token's features. tower: as above."""
    with torch.inference_mode():
        return _encode_anything(tower, 1, 1).num_bytes


def _encode_anything(tower: VisionTower, rows: int, cols: int) -> ImageFeatures:
    count = rows * cols * tower.patches_per_token
    patches = torch.empty(count, tower.patch_bytes, dtype=torch.uint8, device=tower.device)
    return tower.encode(patches, ImageGrid(rows * cols, rows, cols, rows, cols))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make while it is active, and that are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {own.untyped_storage()._cdata for own in tree_leaves((args, kwargs)) if isinstance(own, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
