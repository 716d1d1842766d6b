"""make_drafter: from a speculative config to its drafter, method by method."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from typing import Annotated

from outrider.config import SpeculativeConfig
from outrider.core.drafter_faults import words_of
from outrider.core.fields import Range, check_value, shown
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import DraftBuild, Drafter
from outrider.drafters.block import block_drafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.drafters.eagle import eagle_drafter
from outrider.drafters.files import drafter_source, with_method
from outrider.drafters.gemma_assistant import assistant_drafter
from outrider.drafters.mtp import mtp_drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.formats import RankGroup
from outrider.layers import check_ranks
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.registry import build_model
from outrider.models.sources.model_source import ModelSource, WeightError

log = logging.getLogger("outrider")
__all__ = ["DraftBuild", "make_drafter"]


def make_drafter(config: SpeculativeConfig, build: DraftBuild) -> Drafter | None:
    """The drafter of a config; None if all drafting happens on the host. On the meta device: its outline, without
    drafters from outside. Raises ValueError for a drafter that does not fit."""
    config = with_method(config, build)
    drafters: list[Drafter] = []
    for method in config.methods:
        num_layers = sum(len(drafter.attention_layers) for drafter in drafters)
        try:
            drafter = _make(method, config, replace(build, num_drafter_layers=num_layers))
        except WeightError as error:
            files = build.target_source if config.model is None else config.model
            raise WeightError(f"speculative_config: {method!r}: the files of {files} are not those of a drafter that "
                              f"fits: {error}") from None
        if drafter is not None:
            drafters.append(drafter)
    if not drafters:
        return None
    return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)


def _make(method: str, config: SpeculativeConfig, build: DraftBuild) -> Drafter | None:
    k = config.num_speculative_tokens
    match method:
        case "ngram":
            return NgramDrafter(k, min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
        case "suffix":
            return None
        case "draft_model":
            model = _load_model(config, build)
            network = DraftModelNetwork(model, build.first_layer, build.target.vocab_size)
            return AutoregressiveDrafter(method, network, k, max_positions=model.max_positions)
        case "eagle" | "eagle3":
            return eagle_drafter(method, config, build)
        case "block":
            return block_drafter(config, build)
        case "gemma4_assistant":
            return assistant_drafter(config, build)
        case "mtp":
            return mtp_drafter(config, build)
        case _:
            return None if build.is_outline else _custom(method, config, build)


def _load_model(config: SpeculativeConfig, build: DraftBuild) -> Model:
    source = drafter_source(config, build)
    model = load_model(source, dtype=build.dtype, device=build.device, load_format=build.load_format, seed=build.seed,
                       keep_quantized=build.keep_quantized, group=_shared_by(source, build))
    if model.max_positions < build.max_len:
        log.warning("the draft model %s has %d positions and max_model_len is %d: longer texts get no drafts from it",
                    config.model, model.max_positions, build.max_len)
    return model


def _shared_by(source: ModelSource, build: DraftBuild) -> RankGroup | None:
    """The ranks that hold a draft model together: those of the target. If they cannot share its sizes, each rank holds
    all of it."""
    group = build.target.group
    if group is None:
        return None
    try:
        check_ranks(build_model(source.config, dtype=build.dtype, device="meta", source=str(source.config_file)),
                    group.count)
    except ValueError as error:
        log.warning("every rank holds the whole draft model: %s", error)
        return None
    return group


def _custom(path: str, config: SpeculativeConfig, build: DraftBuild) -> Drafter:
    """The drafter of `package.module:Class`, made as Class(num_speculative_tokens, target model)."""
    module, _, name = path.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except Exception as error:  # somebody else's module may raise anything
        raise ValueError(f"speculative_config: cannot import the drafter {path!r}: {words_of(error)}") from error
    if not callable(kind) or (isinstance(kind, type) and not issubclass(kind, Drafter)):
        raise ValueError(f"speculative_config: {path} is not a subclass of outrider.drafters.base.Drafter")
    try:
        made = kind(config.num_speculative_tokens, build.target)
    except Exception as error:
        raise ValueError(f"speculative_config: {path}(num_speculative_tokens, target) raised {words_of(error)}"
                         ) from error
    if not isinstance(made, Drafter):
        raise ValueError(f"speculative_config: {path} made {shown(made)}, not an outrider.drafters.base.Drafter")
    _check_declared(made, path, build.target.num_layers, config.num_speculative_tokens)
    return made


def _check_declared(drafter: Drafter, path: str, num_layers: int, max_drafts: int) -> None:
    """Refuse attributes that every step of the target would fail with."""
    check_value(f"speculative_config: {path}.name", str, drafter.name)
    layers = list[Annotated[int, Range(0, num_layers)]]
    check_value(f"speculative_config: {path}.aux_layers", layers, drafter.aux_layers)
    check_value(f"speculative_config: {path}.lookahead", Annotated[int, Range(0, max_drafts + 1)], drafter.lookahead)
