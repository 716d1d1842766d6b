"""The digest of everything that a page's bytes depend on, beside the tokens: model, drafter, formats, layout.

Pages with another digest are never found, so a cache that outlives its engine cannot return wrong pages."""

from __future__ import annotations

import hashlib
from threading import Lock
from typing import Any

from outrider import __version__
from outrider.cache.groups import CacheLayout
from outrider.config import EngineConfig
from outrider.core.file_digests import value_digest
from outrider.drafters.base import Drafter
from outrider.engine.load import find_model
from outrider.engine.model_digests import describe_kernels, digest_model
from outrider.layers import LayeredModule
from outrider.models.base import Decoder, Model
from outrider.models.sources.model_source import SourceError
from outrider.runner.device import name_device
from outrider.runner.weight_digests import checksum_of

FORM = 1  # raised when the bytes of pages get another order
# Settings on which the numbers in a page may depend, beside those that the layout shows.
SETTINGS = (
    "dtype", "tensor_parallel_size", "model_impl", "attention_backend", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
    "index_key_dtype", "packed_weights", "keep_quantized", "quantization", "activation_bits", "ignore_config_keys",
    "hf_overrides", "exact",
)


def domain_digest(config: EngineConfig, model: Model, drafter: Drafter | None, layout: CacheLayout,
                  loaded_at: float, reading: Lock) -> bytes:
    """Return the digest described above. The model's files are hashed, unless their digests are kept from an earlier
    start. loaded_at: when the worker had read the files. reading: a lock, held while weights in memory are hashed."""
    parts = {
        "form": FORM, "package": __version__, "model": _model_digest(config, model, loaded_at, reading),
        "drafter": [] if drafter is None else [_weights_digest(own, reading) for own in drafter.modules()],
        "layout": [repr(layout.groups), repr(layout.recurrent), repr(layout.page_parts), layout.page_bytes],
        "dtype": [str(model.dtype), model.device.type], "settings": {name: _plain(getattr(config, name))
                                                                      for name in SETTINGS},
        "ropes": [value_digest(own) for own in _ropes(model)],
        "kernels": describe_kernels(name_device(model.device)) if config.exact else None,
    }
    return hashlib.sha256(value_digest(parts).encode()).digest()


def _model_digest(config: EngineConfig, model: Model, loaded_at: float, reading: Lock) -> list[str]:
    try:
        source = find_model(config)
    except SourceError:  # the program gave a model that it holds in memory
        return ["memory", _weights_digest(model, reading), value_digest(dict(model.file_values))]
    if config.load_format == "dummy":
        return ["random", str(config.seed), value_digest(source.config)]
    digests = digest_model(source, None, loaded_at)
    return ["files", digests.weights, digests.config]


def _ropes(model: Model) -> list[list[float]]:
    """Return how each rope rotates: its cos and sin at position 1. For longrope they depend on the served length."""
    tables = [rotary.table for rotary in model.rotaries] if isinstance(model, Decoder) else []
    return [table[1:2].flatten().tolist() for table in tables]


def _weights_digest(module: LayeredModule, reading: Lock) -> str:
    with reading:
        return checksum_of(module.weights()).sha256


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
