"""Plans the layout of an engine's cache from the needs of its layers and the KV cache dtype, and chooses the attention
backend for that dtype."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outrider.cache.groups import CacheLayout, LayerCache, plan_groups
from outrider.cache.kinds import MODEL_CACHE, CacheType, SlidingSpec
from outrider.config import SLIDING, EngineConfig
from outrider.drafters.base import Drafter
from outrider.formats import ModelSize, RankGroup, Ranks
from outrider.kernels.fp8_cache import ScaleNumbers
from outrider.kernels.ops.operation import FP8_CAPABILITY
from outrider.mixers import AttentionLayer
from outrider.mixers.paged.backend import Backend
from outrider.mixers.paged.codecs import FP8_NAMES, find_cache_type
from outrider.mixers.paged.registry import make_backend
from outrider.models.base import Model
from outrider.models.sources.model_source import ModelSource

if TYPE_CHECKING:
    from outrider.mixers import LatentLayer

log = logging.getLogger("outrider")
# Sizes for which kernels over fp8 run on a GPU. Heads of 64, 80, 96, 112, 128, 192, 256 and 512 and latents of 256 and
# 512 were compared with the reference on an H200; sizes between them use the same tiles with other masks.
FP8_HEAD_DIMS = range(64, 512 + 1, 16)
FP8_LATENT_DIMS = range(256, 512 + 1, 64)


def plan_cache(config: EngineConfig, model: Model, drafter: Drafter | None = None, *,
               whole_parts: bool = False) -> CacheLayout:
    """Plan the cache groups for the layers of the target and the drafter, which use the same KV cache dtype.
    whole_parts: see `Backend.needs_whole_parts`."""
    own_layers = [] if drafter is None else drafter.cache_layers()
    if drafter is not None and any(layer.is_recurrent for layer in own_layers):
        raise ValueError(f"drafter {drafter.name!r} has recurrent layers, which a drafter cannot have: choose another "
                         "drafter")
    target, own = (store_claims(config, model.dtype, claims) for claims in (model.cache_layers(), own_layers))
    return plan_groups(target, config.page_size, config.checkpoint_interval, own, whole_parts=whole_parts)


def store_claims(config: EngineConfig, dtype: torch.dtype, claims: Sequence[LayerCache]) -> list[LayerCache]:
    """Return what each layer needs of the cache, with the config's KV cache dtype applied. Layers that the config
    excepts (`kv_cache_dtype_skip_layers`) keep the model's dtype, and so do layers that read the cache of an excepted
    layer."""
    cache_type, skipped = cache_type_of(config, dtype), config.kv_cache_dtype_skip_layers
    sliding = SLIDING in skipped
    return [claim if str(claim.layer if claim.reads is None else claim.reads) in skipped
            or (sliding and isinstance(claim.spec, SlidingSpec)) else claim.stored_as(cache_type) for claim in claims]


def check_cache_types(config: EngineConfig, outline: Model, device: torch.device,
                      capability: tuple[int, int] | None = None) -> None:
    """Raise ValueError if a layer of the target does not support the config's KV cache dtype, or if the device cannot
    convert to it. `outline`: the model on the meta device. `capability`: the compute capability of a GPU that is not in
    this machine."""
    claims = outline.cache_layers()
    numbers = {str(claim.layer) for claim in claims}
    for entry in config.kv_cache_dtype_skip_layers:
        if entry not in (SLIDING, *numbers):
            raise ValueError(f"kv_cache_dtype_skip_layers: {entry!r} must be {SLIDING!r} or the number of a layer that "
                             f"has a cache ({', '.join(sorted(numbers, key=int))})")
    stored = store_claims(config, outline.dtype, claims)
    if config.kv_cache_dtype in FP8_NAMES and device.type == "cuda":
        in_fp8 = {claim.layer for claim, own in zip(stored, claims, strict=True) if claim != own}
        layers = [layer for layer in outline.attention_layers if layer.index in in_fp8]
        _check_fp8_on_gpu(config.kv_cache_dtype, layers, device, capability)


def _check_fp8_on_gpu(name: str, layers: Sequence[AttentionLayer | LatentLayer], device: torch.device,
                      capability: tuple[int, int] | None) -> None:
    if (capability or torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        gpu = torch.cuda.get_device_name(device) if capability is None else "the GPU"
        raise ValueError(f"kv_cache_dtype={name!r}: {gpu} cannot convert numbers to fp8: use kv_cache_dtype='auto'")
    for layer in layers:
        what, size, sizes = (("heads", layer.head_dim, FP8_HEAD_DIMS) if isinstance(layer, AttentionLayer) else
                             ("latents", layer.latent_dim, FP8_LATENT_DIMS))
        if size not in sizes:
            raise ValueError(f"kv_cache_dtype={name!r}: layer {layer.index} has {what} of {size} numbers, and the fp8 "
                             f"kernels of GPUs need a multiple of {sizes.step} from {sizes[0]} to {sizes[-1]}: name "
                             "the layer in kv_cache_dtype_skip_layers, or use kv_cache_dtype='auto'")


def find_cache_scales(config: EngineConfig, source: ModelSource, model: Model) -> dict[int, ScaleNumbers]:
    """Return the scales of an fp8 cache from the model's files, by layer; empty for another cache. Latents (MLA) are
    cached in fp8 without a scale, because they are normed and so stay in range."""
    if config.kv_cache_dtype not in FP8_NAMES or config.load_format == "dummy":
        return {}
    found, scales = source.cache_scales(), {}
    for layer in model.attention_layers:
        if layer.index in found and isinstance(layer, AttentionLayer):
            scales[layer.index] = ScaleNumbers(*(_of_heads(own, layer, model.group) for own in found[layer.index]))
    if found:
        log.info("fp8 cache: %d layers use the scales in the files, the others the scale 1", len(scales))
    return scales


def _of_heads(scales: list[float], layer: AttentionLayer, group: RankGroup | None) -> tuple[float, ...]:
    """Return the fp8 scale of each kv head that this rank holds. scales: the numbers in the model's files: none (each
    scale is then 1), one that all heads share, or one for each kv head of the whole model."""
    if group is not None and len(scales) > 1:
        held = Ranks.from_group(group).share(ModelSize(len(scales)), min(len(scales), group.count))
        scales = scales[held.start : held.stop]
    if len(scales) not in (0, 1, layer.num_kv_heads) or not all(0 < own < math.inf for own in scales):
        raise ValueError(f"the cache scales of layer {layer.index} in the model's files are {scales}, and they must be "
                         f"one positive number, or {layer.num_kv_heads} (one for each KV head): use "
                         "kv_cache_dtype='auto', or correct the files")
    return tuple(scales) if len(scales) == layer.num_kv_heads else tuple(scales or [1.0]) * layer.num_kv_heads


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
    """Return the cache type that `kv_cache_dtype` names; "auto" stands for the model's dtype."""
    return find_cache_type(config.kv_cache_dtype, dtype)
