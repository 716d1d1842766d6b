"""Find the scales of an fp8 KV cache among a model's tensors: `k_scale` and `v_scale` below a layer's attention, or
`kv_scale` for both. Each is one number, or one for every key/value head. This file does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.models.config_reader import ConfigError

SUFFIXES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale")  # the last is of queries, which no cache holds
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\..*\.(k|v|kv)_scale$")
# Modules with layers of their own, whose numbers begin at 0 too: draft heads and encoders.
OTHERS = {"mtp", "visual", "vision_tower", "vision_model", "audio_tower"}

# Of keys and of values, by layer: no scale, one, or one for each head.
ScalePairs = dict[int, tuple[list[float], list[float]]]


def find_scales(names: Iterable[str], section: Mapping[str, Any]) -> list[str]:
    """Find scales among the names of tensors. section: the `quantization_config`, which may say that the scales are for
    another type than fp8."""
    found = [name for name in names if _NAME.search(name) and OTHERS.isdisjoint(name.split("."))]
    scheme = section.get("kv_cache_scheme")
    if found and isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise ConfigError(f"quantization_config: kv_cache_scheme is {dict(scheme)!r}, and the engine reads scales of "
                          "an fp8 cache only: use kv_cache_dtype='auto'")
    return found


def pair_scales(tensors: Iterable[tuple[str, Any]]) -> ScalePairs:
    """Return (scales of keys, scales of values) for each layer that has scales."""
    made: dict[int, dict[str, list[float]]] = {}
    for name, tensor in tensors:
        match = _NAME.search(name)
        assert match is not None, f"{name} is no scale"
        made.setdefault(int(match[1]), {})[match[2]] = tensor.double().flatten().tolist()
    return {layer: (own.get("k", own.get("kv", [])), own.get("v", own.get("kv", []))) for layer, own in made.items()}
