"""ModelSource: a model's config, weights and tokenizer, whatever the form of its files.

A source knows nothing of layers or devices: it hands out a config in Hugging Face's names, and tensors one at a time.
Torch is imported only when weights are read, so the engine reads a model's config and tokenizer without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outrider.models.config_reader import ConfigReader, without_keys

if TYPE_CHECKING:
    import torch

    from outrider.kernels.quantized import QuantizedRows


class SourceError(ValueError):
    """A model's files are missing, damaged or not supported. The message says which, and what to do."""


class WeightError(ValueError):
    """Weights that do not fit the model, or a file that cannot be read."""


@dataclass(frozen=True)
class ModelSource(ABC):
    """Plain data, so that it can be sent to another process."""

    name: str
    path: Path  # the folder or the file
    config: dict[str, Any]  # in the form of config.json of a Hugging Face folder
    eos_token_ids: tuple[int, ...]

    @property
    def config_file(self) -> Path:
        """The file that describes the model."""
        return self.path

    def reader(self) -> ConfigReader:
        """The config, for reads whose errors name its file."""
        return ConfigReader(self.config, str(self.config_file))

    def without_keys(self, keys: Collection[str]) -> Self:
        """The source with a config that lacks some keys."""
        return replace(self, config=without_keys(self.config, keys)) if keys else self

    @abstractmethod
    def tensor_names(self) -> set[str]:
        """Names of all tensors in the files, of which no tensor is read."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each call reads the files anew, one tensor at a time."""

    def read(self, *, keep_quantized: bool) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
        """Tensors for the loader. `keep_quantized`: quantised weights come in the file's own bits; the loader
        dequantises those that a layer cannot keep."""
        return self.tensors()

    def kept_bytes(self) -> dict[str, int]:
        """Bytes of the quantised weights that `read` can yield in the file's own bits, by name."""
        return {}

    @abstractmethod
    def tokenizer(self) -> Path | dict[str, Any]:
        """A folder with tokenizer files, or a GGUF file's metadata."""
