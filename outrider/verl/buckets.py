"""Buckets: weights on their way to an engine in another process of this machine, as files in its shared memory.

A bucket has the bytes of its tensors one after the other, as `outrider.engine.weight_files.read_packed` reads them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, cast

import torch

SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Bucket:
    """The path of a bucket's file, and the tensors that it has."""

    path: str
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)

    def add(self, file: BinaryIO, name: str, tensor: torch.Tensor) -> None:
        own = tensor.detach().to("cpu").contiguous()
        file.write(memoryview(own.reshape(-1).view(torch.uint8).numpy()))
        self.names.append(name)
        self.dtypes.append(str(own.dtype).removeprefix("torch."))
        self.shapes.append(list(own.shape))

    def remove(self) -> None:
        os.unlink(self.path)


async def fill_buckets(weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
                       most_bytes: int) -> AsyncIterator[Bucket]:
    """Yield buckets of at most so many bytes, or of one tensor. A bucket must be removed when it has been read."""
    bucket, file, num_bytes = None, None, 0
    try:
        async for name, tensor in _each(weights):
            if bucket is not None and file is not None and num_bytes + tensor.nbytes > most_bytes:
                file.close()
                full, bucket, num_bytes = bucket, None, 0
                yield full
            if bucket is None:
                file = cast(BinaryIO, NamedTemporaryFile(dir=_folder(), prefix="outrider-", delete=False))
                bucket = Bucket(file.name)
            assert file is not None
            bucket.add(file, name, tensor)
            num_bytes += tensor.nbytes
        if bucket is not None and file is not None:
            file.close()
            last, bucket = bucket, None
            yield last
    finally:
        if bucket is not None:  # the weights ended with an error
            bucket.remove()


async def drain(weights: Any) -> None:
    """Read weights and drop them: making them takes part in collectives of the trainer's ranks."""
    async for _ in _each(weights):
        pass


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item


def _folder() -> str | None:
    return str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
