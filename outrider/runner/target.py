"""Builds the target model on its device after the checks of `check.py`, and loads its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from outrider.config import QUANTIZATIONS, EngineConfig
from outrider.core.lazy_exports import LateModule
from outrider.formats.ranks import RankGroup
from outrider.kernels import compiling
from outrider.kernels import cpu as native
from outrider.kernels.code_kinds import INT4
from outrider.kernels.ops.operation import FP8_CAPABILITY
from outrider.layers import Linear, find_modules
from outrider.layers.fuse import use_activation_bits
from outrider.models.base import Model
from outrider.models.loader import Watch, declare_formats, fill_model, stored_formats
from outrider.models.registry import build_model
from outrider.models.sources.model_source import ModelSource
from outrider.models.sources.quantization import quantization_section
from outrider.runner.cache_plan import find_cache_scales
from outrider.runner.check import check_target
from outrider.runner.device import pick_device, pick_dtype
from outrider.runner.memory import enough_memory
from outrider.runner.worker_ranks import ONE_RANK

if TYPE_CHECKING:
    from outrider.formats import scaled
else:
    scaled = LateModule("outrider.formats.scaled")

log = logging.getLogger("outrider")


def build_target(config: EngineConfig, source: ModelSource, group: RankGroup = ONE_RANK.group) -> Model:
    """Build the model that the config asks for, on its device and without weights. With several ranks only this rank's
    part is built."""
    device = pick_device(config.device)
    compiling.prepare_compiler(device)
    dtype = pick_dtype(config.dtype, source, device)
    if device.type == "cpu" and dtype == torch.float32:
        warn_without_native_kernels()
    outline = _build(config, source, dtype, device, torch.device("meta"), group)
    check_target(config, source, outline, device)
    with enough_memory("the weights", "choose a smaller model or dtype, or free what else is on the device"):
        model = _build(config, source, dtype, device, device, group)
        model.weights()  # formats allocate their weights when they are first asked for them
    model.cache_scales = find_cache_scales(config, source, model)
    return model


def outline_target(config: EngineConfig, source: ModelSource, device: torch.device,
                   group: RankGroup = ONE_RANK.group) -> Model:
    """Build the model that the config asks for on the meta device. Its tensors have the shapes and types that they
    would have on `device`, which may be in another machine, and take no memory."""
    return _build(config, source, pick_dtype(config.dtype, source, device), device, torch.device("meta"), group)


def _build(config: EngineConfig, source: ModelSource, dtype: torch.dtype, device: torch.device, place: torch.device,
           group: RankGroup) -> Model:
    """Build the model for a device. `place`: the device of its tensors, which is that device or the meta device."""
    values = source.config if config.index_key_dtype == "auto" else with_index_keys(config, source.config, device)
    model = _part_of(group, build_model(values, dtype=dtype, max_len=config.max_model_len, device=place,
                                        source=str(source.config_file), model_impl=config.model_impl))
    declare_stored(model, config, source, device)
    return model


def warn_without_native_kernels() -> None:
    if not native.available() and not native.is_switched_off():
        log.warning("without native CPU kernels torch computes, which takes more time and memory: %s", native.reason())


def _part_of(group: RankGroup, model: Model) -> Model:
    """Cut the model down to one rank's shard. No weight is allocated yet."""
    if group.count > 1:
        model.shard(group)
    return model


def declare_stored(model: Model, config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    """Let layers keep their weights in the quantised format of the files, or quantise them while they are read, if the
    config asks for it."""
    asked = config.quantization if config.quantization in QUANTIZATIONS else None  # others name the files' own form
    if asked is not None and not config.keep_quantized:
        raise ValueError(f"quantization={asked!r} needs keep_quantized=True: set it, or leave quantization out")
    made = None if quantization_section(source.config) else asked  # quantised files stay what they are
    if config.keep_quantized:
        declare_formats(model, stored_formats(model, source), device, made)
    if made is not None and not any(slot.quantize for slot in model.weights().values()):
        if not any(scaled.choose_made(made, linear.declared) for linear in find_modules([model], Linear)):
            groups = f" and inputs that groups of {scaled.INT4_GROUPS} divide" if made == INT4 else ""
            raise ValueError(f"quantization={made!r}: no linear layer of {config.model} can be quantised so, because a "
                             f"layer needs {scaled.LEAST_OUTPUTS} outputs or more{groups}: leave quantization out")
        raise ValueError(f"quantization={made!r}: there is no kernel for {model.dtype} with such weights on {device}; "
                         "choose dtype='bfloat16', or leave quantization out")


def load_target(config: EngineConfig, source: ModelSource, watch: Watch | None = None) -> Model:
    """Build the model that the config asks for, and fill it with weights. `watch`: see fill_model."""
    model = build_target(config, source)
    fill_target(model, config, source, watch)
    return model


def fill_target(model: Model, config: EngineConfig, source: ModelSource, watch: Watch | None) -> None:
    fill_model(model, source, load_format=config.load_format, seed=config.seed, watch=watch)
    if config.activation_bits != EngineConfig.activation_bits:  # the default is what products have by themselves
        said = use_activation_bits(model, config.activation_bits)
        log.log(logging.WARNING if config.activation_bits == 8 else logging.INFO, said)


def with_index_keys(config: EngineConfig, values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the model's config with the type in which its indexers store keys (`index_key_dtype`). Raises ValueError
    if the model has no indexer, or if the device cannot convert to the type."""
    asked = f"index_key_dtype={config.index_key_dtype!r}"
    section = values.get("text_config")  # a language model within another has its keys there
    if isinstance(section, Mapping) and section.get("index_topk") is not None:
        return {**values, "text_config": with_index_keys(config, section, device)}
    if values.get("index_topk") is None:
        raise ValueError(f"{asked}: {config.model} has no indexer, so it stores no index keys: leave index_key_dtype "
                         "out")
    is_here = device.type == "cuda" and torch.cuda.is_available()  # a plan may be for a GPU that is elsewhere
    if is_here and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ValueError(f"{asked}: {torch.cuda.get_device_name(device)} cannot convert numbers to fp8; leave "
                         "index_key_dtype out")
    return {**values, "index_key_dtype": config.index_key_dtype}
