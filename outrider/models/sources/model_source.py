"""ModelSource: a model's config, weights and tokenizer, read from files of any supported format.

A source does not depend on layers or devices. It gives a config with Hugging Face's keys, and yields tensors one at a
time. Torch is imported only when weights are read, so the engine reads config and tokenizer without it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outrider.models.config_reader import ConfigReader, without_keys

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight
    from outrider.models.sources.cache_scales import ScalePairs


VISION_PART = "mmproj"  # in the name of a GGUF file with the vision part of a model


class SourceError(ValueError):
    """Raised when a model's files are missing, damaged or not supported. The message names the cause and says what to
    do."""


class WeightError(ValueError):
    """Raised when weights do not fit the model, or a file cannot be read."""


@dataclass(frozen=True)
class ModelSource(ABC):
    """A model's files. It is plain data, so it can be sent to another process."""

    name: str
    path: Path  # the folder or the file
    config: dict[str, Any]  # in the form of config.json of a Hugging Face folder
    eos_token_ids: tuple[int, ...]

    @property
    def config_file(self) -> Path:
        """The path of the file that describes the model."""
        return self.path

    def reader(self) -> ConfigReader:
        """Return a reader of the config; its errors name the config's file."""
        return ConfigReader(self.config, str(self.config_file))

    def without_keys(self, keys: Collection[str]) -> Self:
        """Return the source with some keys removed from its config."""
        return replace(self, config=without_keys(self.config, keys)) if keys else self

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return the source with some config values replaced or added. A section (`text_config`) keeps its other
        values."""
        if "eos_token_id" in values:
            raise ValueError("hf_overrides: eos_token_id is not supported: use stop_token_ids and ignore_eos of "
                             "SamplingParams")
        if not values:
            return self
        sections = {key: own for key, own in self.config.items() if key.endswith("_config") and isinstance(own, dict)}
        merged = {key: {**sections[key], **value} if key in sections and isinstance(value, Mapping) else value
                  for key, value in values.items()}
        return replace(self, config={**self.config, **merged})

    @abstractmethod
    def tensor_names(self) -> set[str]:
        """Return the names of all tensors in the files. No tensor is read."""

    def stored_format(self, name: str) -> StoredFormat | None:
        """Return how the files store the matrix of this name (without ".weight"), read from headers only. None if it is
        not quantised."""
        return None

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        """Yield the tensors of the files, one at a time. A quantised matrix comes as a `StoredWeight` with its scales.
        Each call reads the files again."""

    def cache_scales(self) -> ScalePairs:
        """Return the files' scales for an fp8 cache, by layer."""
        return {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the files, one at a time, with quantised matrices dequantised."""
        import torch

        for name, tensor in self.read():
            yield name, tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
            del tensor  # before the next one is read: two would be in memory otherwise

    @abstractmethod
    def tokenizer(self) -> Path | dict[str, Any]:
        """Return the tokenizer's source: a folder with its files, or a GGUF file's metadata."""
