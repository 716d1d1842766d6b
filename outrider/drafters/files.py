"""Finds the files of a drafter, and detects the kind of drafter from config and tensors, never from the name."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

from outrider.config import AUTO_METHOD, SpeculativeConfig
from outrider.drafters.base import DraftBuild
from outrider.models.block_config import is_block_config
from outrider.models.eagle import KINDS
from outrider.models.gemma4_assistant import MODEL_TYPES
from outrider.models.sources import ModelSource, resolve

log = logging.getLogger("outrider")
EAGLE_INPUT = re.compile(r"(model\.)?(fc|fusion_fc)\.weight")  # joins embedding and hidden state
MODULE = re.compile(r"mtp\..*|.*\.eh_proj\.weight")  # a tensor of a multi-token-prediction module
NOT_SERVED = {"mlp_speculator": "an MLP speculator", "medusa": "a Medusa head"}  # by model_type
FIRST_LAYER = re.compile(r"(model\.|backbone\.)(language_model\.)?layers\.0\..*")  # a tensor of a whole model


def drafter_source(config: SpeculativeConfig, build: DraftBuild) -> ModelSource:
    """Find the source of the files that `model` of a speculative_config names. They are downloaded if need be."""
    assert config.model is not None
    return resolve(config.model, weights=build.load_format != "dummy").without_keys(config.ignore_config_keys)


def with_method(config: SpeculativeConfig, build: DraftBuild) -> SpeculativeConfig:
    """Return the config with a draft method. If it names none, the files of `model` decide. "mtp" is also vLLM's name
    for a Gemma 4 assistant."""
    if config.model is None or not {AUTO_METHOD, "mtp"} & set(config.methods):
        return config
    source = drafter_source(config, build)
    if config.method != AUTO_METHOD:
        named = ["gemma4_assistant" if method == "mtp" and is_assistant(source) else method
                 for method in config.methods]
        return replace(config, method=named[0] if isinstance(config.method, str) else named)
    found = method_of(source, has_tensors=build.load_format != "dummy", is_target=_is_target(config.model, build))
    log.info("speculative_config: the files of %s are those of method %r", config.model, found)
    return replace(config, method=found)


def method_of(source: ModelSource, *, has_tensors: bool, is_target: bool) -> str:
    """Return the draft method for which a model's files are made. `has_tensors`: whether the weights can be read.
    `is_target`: whether these are the target's own files, which can draft only with a multi-token-prediction module."""
    config = source.reader()
    classes = " ".join(map(str, config.get("architectures", list, []))).lower()
    for word, kind in NOT_SERVED.items():
        if source.config.get("model_type") == word or word.replace("_", "") in classes:
            raise ValueError(f"speculative_config: {source.name} is {kind}, which is not served: take an EAGLE head or "
                             "a block drafter (docs/drafters.md), or train one (docs/training.md)")
    if is_assistant(source):
        return "gemma4_assistant"
    if is_block_config(config):
        return "block"
    if config.has("speculators_model_type"):
        return str(config.must_equal("speculators_model_type", *KINDS))
    for word, method in (("eagle3", "eagle3"), ("eagle", "eagle"), ("mtp", "mtp")):
        if word in classes:
            return method
    names = source.tensor_names() if has_tensors else set()
    if any(map(EAGLE_INPUT.fullmatch, names)):
        return "eagle"
    has_module, has_layers = any(map(MODULE.fullmatch, names)), any(map(FIRST_LAYER.fullmatch, names))
    return "mtp" if is_target or (has_module and not has_layers) else "draft_model"


def is_assistant(source: ModelSource) -> bool:
    return source.config.get("model_type") in MODEL_TYPES


def _is_target(model: str, build: DraftBuild) -> bool:
    target = build.target_source
    return target is not None and (model == target or _whole(model) == _whole(target))


def _whole(path: str) -> Path:
    return Path(path).expanduser().resolve()
