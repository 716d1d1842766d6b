"""The layout of an engine's cache, from what its layers claim and the type that keys and values are stored as, and the
attention backend that serves that type."""

from __future__ import annotations

import logging

import torch

from outrider.cache.groups import CacheLayout, plan_groups
from outrider.cache.kinds import MODEL_CACHE, CacheType
from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.mixers import AttentionLayer
from outrider.mixers.paged.base import Backend
from outrider.mixers.paged.codecs import find_cache_type
from outrider.mixers.paged.registry import make_backend
from outrider.models.base import Model

log = logging.getLogger("outrider")


def plan_cache(config: EngineConfig, model: Model, drafter: Drafter | None = None, *,
               whole_parts: bool = False) -> CacheLayout:
    """Plan the groups of the target's and the drafter's layers. Both store keys and values as the same type.
    whole_parts: see `Backend.needs_whole_parts`."""
    cache_type = cache_type_of(config, model.dtype)
    own_layers = [] if drafter is None else drafter.cache_layers()
    if drafter is not None and any(layer.is_recurrent for layer in own_layers):
        raise ValueError(f"drafter {drafter.name!r} has recurrent layers, which only a target can have: choose another")
    target, own = ([layer.stored_as(cache_type) for layer in claims] for claims in (model.cache_layers(), own_layers))
    return plan_groups(target, config.page_size, config.checkpoint_interval, own, whole_parts=whole_parts)


def choose_backend(config: EngineConfig, model: Model, max_drafts: int) -> Backend:
    has_masks = any(isinstance(layer, AttentionLayer) and layer.has_mask for layer in model.attention_layers)
    cache_type = cache_type_of(config, model.dtype)
    backend = make_backend(config.attention_backend, model.device, model.dtype, max_drafts, exact=config.exact,
                           has_masks=has_masks, cache_type=cache_type)
    if cache_type != MODEL_CACHE and config.attention_backend == "auto" and backend.name == "torch":
        log.warning("kv_cache_dtype=%r costs time: no kernel serves it, so attention runs as plain torch operations",
                    config.kv_cache_dtype)
    return backend


def cache_type_of(config: EngineConfig, dtype: torch.dtype) -> CacheType:
    """How a model of this dtype stores keys and values."""
    return find_cache_type(config.kv_cache_dtype, dtype)
