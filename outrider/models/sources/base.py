"""ModelSource: where a model's config, weights and tokenizer come from, whatever the form of its files.

Knows nothing of layers or devices: it hands out a config in Hugging Face's names and tensors one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.kernels.quantized import QuantizedRows


class SourceError(ValueError):
    """A model's files are missing, damaged or not supported. The message says which, and what to do."""


@dataclass(frozen=True)
class ModelSource:
    name: str
    path: Path  # the folder or the file
    config: dict[str, Any]  # as config.json of a Hugging Face folder
    eos_token_ids: tuple[int, ...]
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]  # each call reads the files anew, one tensor at a time
    tokenizer: Callable[[], Path | dict[str, Any]]  # a folder with tokenizer files, or a GGUF file's metadata
    # The same tensors, quantised weights in the file's own bits where these can be kept; None: the file has none.
    stored: Callable[[], Iterator[tuple[str, torch.Tensor | QuantizedRows]]] | None = None

    def read(self, *, keep_quantized: bool) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
        """For the loader: a layer that cannot keep bits gets the numbers they stand for either way."""
        return self.stored() if keep_quantized and self.stored is not None else iter(self.tensors())
