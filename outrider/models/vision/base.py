"""VisionTower: the interface of models that turn an image's patches into embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from outrider.formats import StoredWeight
from outrider.layers import Module
from outrider.models.config import ConfigReader
from outrider.models.vision.grid import ImageGrid

Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor | StoredWeight]]


@dataclass(frozen=True)
class ImageFeatures:
    """The embeddings of one image."""

    features: torch.Tensor  # [tokens, hidden size of the language model]
    # In models with deepstack: what is added to the hidden states of the image's tokens after each of the first
    # layers. Each tensor has the shape of `features`.
    deepstack: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(own.nbytes for own in (self.features, *self.deepstack))


class VisionTower(Module, ABC):
    """The part of a model that encodes images. The constructor takes readers of the whole model's config and of its
    `vision_config`, and (*, dtype, device). The loader fills the weights by the names in `parts`. Every rank holds the
    whole tower."""

    prefixes: tuple[str, ...]  # what the names of the tower's tensors begin with
    unused: tuple[str, ...] = ()  # what the names of tensors among them begin with that no tower uses
    patches_per_token: int
    patch_bytes: int  # of one patch as `encode` takes it

    def __init__(self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.hidden_size = config.text_section().required("hidden_size", int)  # of the language model

    @abstractmethod
    def encode(self, patches: torch.Tensor, grid: ImageGrid) -> ImageFeatures:
        """Return the embeddings of one image. patches: [patches, bytes] uint8 on the tower's device, from the
        preprocessing. The result depends on nothing else, so an image has the same bits whenever it is encoded."""

    def shorten(self) -> None:
        """Drop blocks of an outline that would take no more memory than the others do, so that it encodes faster."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint's tensor does not belong to the tower. The loader refuses every other tensor that has no
        slot."""
        return not name.startswith(self.prefixes) or name.startswith(self.unused or ("\0",)) or (
            name.endswith("rotary_emb.inv_freq"))

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Do nothing: tensors of other parts of the model need no check."""

    def slot_name(self, name: str) -> str:
        return name

    def arrivals(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        """Yield the tower's tensors among those of a checkpoint, in the form that its slots take."""
        for name, tensor in tensors:
            if not self.ignores(name):
                yield name, tensor
            del tensor  # before the next one is read

    @property
    def weight_bytes(self) -> int:
        """Return the memory that the tower's weights take, even if the tower is on the meta device and has none."""
        return sum(slot.nbytes for slot in self.weights().values())
