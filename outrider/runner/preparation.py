"""Prepares the objects that a model's steps need, from the config: limits, drafter, attention backend, layout of the
cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider import drafters
from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.background_work import AllBackgroundWork
from outrider.core.lazy_exports import LateModule
from outrider.drafters.base import DraftBuild, Drafter
from outrider.drafters.guard import DrafterGuards
from outrider.feature_list import worker_features
from outrider.layers.fuse import prepare
from outrider.models.base import Model
from outrider.runner.cache_plan import choose_backend, plan_cache
from outrider.runner.device import gpu_bytes
from outrider.runner.parts import StepParts
from outrider.runner.worker_feature import WorkerFeature
from outrider.runner.worker_ranks import ONE_RANK, WorkerRanks

if TYPE_CHECKING:
    from outrider.runner import exact as exact_mode
else:
    exact_mode = LateModule("outrider.runner.exact")



def gather_parts(config: EngineConfig, model: Model, drafter: Drafter | None,
                 ranks: WorkerRanks = ONE_RANK) -> StepParts:
    """Gather the objects of which a model's steps are made. `drafter`: an existing drafter, used instead of the one in
    the config."""
    speculative = config.speculative
    max_drafts = 0 if drafter is None else drafter.max_drafts
    if speculative is not None:
        max_drafts = max(max_drafts, speculative.num_speculative_tokens)
    limits = config.limits(gpu_bytes=gpu_bytes(model.device), max_positions=model.max_positions,
                           vocab_size=model.vocab_size, max_drafts=max_drafts)
    limits = replace(limits, hidden_size=model.hidden_size)
    if speculative is not None and drafter is None:
        drafter = drafters.make_drafter(speculative, draft_build(config, model, limits))
    features: list[WorkerFeature] = worker_features(config, model)
    if config.exact:
        exact_mode.refuse_inexact(config, model, [feature.name for feature in features if feature.edits_logits])
    backend = choose_backend(config, model, max_drafts)
    layout = plan_cache(config, model, drafter, whole_parts=backend.needs_whole_parts)
    weight_bytes = sum(slot.nbytes for slot in model.weights().values())
    weight_bytes += 0 if drafter is None else drafter.weight_bytes()
    packed_bytes = prepare_all(model, drafter, config)
    rates = None if speculative is None else speculative.rates_by_row
    for feature in features:
        limits = feature.limit(limits, model, drafter)
    observers = [observer for feature in features for observer in feature.observers()]
    guards = DrafterGuards(drafter, model.group, ranks.without_sums, observers)
    return StepParts(model, drafter, guards, rates, limits, layout, backend,
                     "processed" if config.logprobs_mode == "processed" else "raw", weight_bytes, packed_bytes,
                     config.enable_prefix_caching, config.exact, ranks, features,
                     AllBackgroundWork([feature.background() for feature in features]))


def draft_build(config: EngineConfig, model: Model, limits: Limits) -> DraftBuild:
    may_round = config.keep_quantized and not config.adapt_drafter  # numbers can learn, codes cannot
    return DraftBuild(model, model.dtype, model.device, limits.max_len, config.load_format, config.seed, config.model,
                      keep_quantized=may_round, rounds_output=may_round)


def prepare_all(model: Model, drafter: Drafter | None, config: EngineConfig) -> int:
    """Prepare the layers of the model and its drafter for steps, and return the bytes of the packed copies that this
    makes. The drafter is prepared first and never as exact, since drafts cannot change the text; layers that both use
    are then prepared as the model needs them."""
    modules = [] if drafter is None else drafter.modules()
    for module in modules:
        module.follow_target()
    return prepare(modules, config.packed_weights) + prepare([model], config.packed_weights, config.exact)
