"""Checksums of an engine's weights. A trainer compares them with those of its own weights, to check an update. No
torch.

A tensor's checksum is the SHA-256 of its bytes, with the elements in the order of the checkpoint and in the dtype of
the engine. So it does not depend on how the tensor was loaded: from a file, alone or with others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorChecksum:
    """The checksum of one tensor, and the form in which the engine stores the tensor."""

    sha256: str
    dtype: str  # a trainer converts its tensor to this dtype before it computes the checksum
    shape: tuple[int, ...]
    kind: str | None = None  # the kind of codes, if the engine holds codes and not numbers

    @property
    def line(self) -> str:
        return f"{self.sha256} {self.dtype} {list(self.shape)} {self.kind or 'numbers'}"


@dataclass(frozen=True)
class WeightsChecksum:
    """The checksums of a model's weights, prediction modules included, by their names in the checkpoint."""

    tensors: Mapping[str, TensorChecksum]

    @property
    def sha256(self) -> str:
        """Return one checksum over all tensors: the SHA-256 of their lines, in the order of their names."""
        lines = "".join(f"{name} {self.tensors[name].line}\n" for name in sorted(self.tensors))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def coded(self) -> list[str]:
        """Return the names of the weights that are stored as quantized codes. Only an engine with the same codes has
        the same checksums."""
        return [name for name, tensor in self.tensors.items() if tensor.kind is not None]

    def differences(self, other: Mapping[str, str]) -> list[str]:
        """Return the names of tensors whose checksum differs from the one in `other` (checksums by name), or that only
        one side has."""
        own = {name: tensor.sha256 for name, tensor in self.tensors.items()}
        return sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))


def sha256_of(parts: Iterable[Any]) -> str:
    """Return the checksum of consecutive buffers of bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
