"""Metadata: typed reads of the keys that describe a GGUF file's architecture. Keys that are never read are refused."""

from __future__ import annotations

from typing import Any

from outrider.models.sources.base import SourceError
from outrider.models.sources.gguf_header import Header

HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")  # keys that change nothing, or are said twice


class Metadata:
    """The keys of a file's architecture, and questions about its tensors."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.prefix = f"{header.metadata.get('general.architecture')}."
        self._read = {self.prefix + key for key in HARMLESS}

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self.prefix + key)
        return self.header.metadata.get(self.prefix + key, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise SourceError(f"{self.header.path}: metadata {self.prefix}{key} is missing; the file is damaged or "
                              "incomplete")
        return value

    def need_number(self, key: str) -> Any:
        """A value that is the same in all layers."""
        value = self.need(key)
        if isinstance(value, list):
            raise SourceError(f"{self.header.path}: {self.prefix}{key} per layer is not supported")
        return value

    def by_layer(self, key: str) -> list[Any]:
        """The value of each layer; a single value stands for all of them."""
        value, count = self.need(key), self.need("block_count")
        if not isinstance(value, list):
            return [value] * count
        if len(value) < count:
            raise SourceError(f"{self.header.path}: {self.prefix}{key} has {len(value)} values for {count} layers")
        return value[:count]

    def must_equal(self, key: str, value: Any, why: str) -> None:
        found = self.get(key, value)
        if found != value:
            raise SourceError(f"{self.header.path}: {self.prefix}{key} = {found!r} is not supported{why}")

    def refusal(self, key: str, why: str) -> SourceError:
        return SourceError(f"{self.header.path}: {self.prefix}{key} = {self.get(key)!r} is not supported: {why}")

    def refuse_unread(self) -> None:
        for key, value in self.header.metadata.items():
            if key.startswith(self.prefix) and key not in self._read:
                raise SourceError(f"{self.header.path}: {key} = {value!r} is not supported")

    @property
    def num_layers(self) -> int:
        """The layers of the model itself: those behind them predict further tokens and are not read."""
        return int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))

    def layers_with(self, tensor: str) -> list[int]:
        """The layers that have a tensor of this name behind "blk.0."."""
        return [layer for layer in range(self.num_layers) if f"blk.{layer}.{tensor}" in self.header.tensors]
