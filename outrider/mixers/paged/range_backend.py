"""The backend of steps in which tokens attend to later tokens, for models whose usual backend cannot compute them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.mixers.paged.backend import Backend, KeyValueCache
from outrider.mixers.paged.codecs import ModelCodec
from outrider.mixers.paged.flex_backend import FlexBackend
from outrider.mixers.paged.torch_backend import TorchBackend


def make_range_backend(device: torch.device, caches: Sequence[KeyValueCache]) -> Backend:
    """Make the backend. caches: the layers' caches, which it must be able to read."""
    if device.type != "cuda" or not all(isinstance(cache.codec, ModelCodec) for cache in caches):
        return TorchBackend()
    made = FlexBackend()
    try:
        for cache in caches:
            made.check_cache(cache)
    except ValueError:  # pages lie apart by other distances than FlexAttention can read
        return TorchBackend()
    return made
