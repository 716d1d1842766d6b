"""StepParts: what steps are made of, gathered before it is known how many pages there will be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.cache.groups import CacheLayout
from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.drafters.base import Drafter
from outrider.drafters.guard import DrafterGuards
from outrider.drafters.registry import DraftBuild, make_drafter
from outrider.drafters.synthetic import SyntheticAcceptance
from outrider.layers.fuse import prepare
from outrider.mixers import CachedLayers
from outrider.mixers.paged.base import Backend
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.rows import RecurrentRows
from outrider.models.base import Model
from outrider.runner.cache_plan import choose_backend, plan_cache
from outrider.runner.device import gpu_bytes
from outrider.runner.exact import refuse_inexact
from outrider.runner.grammars import GrammarRows
from outrider.runner.interface import Grammars
from outrider.runner.rows import RowState
from outrider.runner.step import DeviceStep
from outrider.sample.sampler import LogprobsMode


@dataclass(frozen=True)
class StepParts:
    """A model, its drafter and all that a step of theirs needs beside the pool."""

    model: Model
    drafter: Drafter | None
    drafting: DrafterGuards
    synthetic: SyntheticAcceptance | None
    limits: Limits
    layout: CacheLayout
    backend: Backend
    logprobs_mode: LogprobsMode
    weight_bytes: int
    packed_bytes: int
    enable_prefix_caching: bool
    exact: bool
    grammars: Grammars | None

    @property
    def _takes_checkpoints(self) -> bool:
        return self.enable_prefix_caching and bool(self.layout.recurrent.layers)

    @property
    def takes_spans(self) -> bool:
        """Whether every layer can let tokens of a span see each other in both directions."""
        return self.backend.takes_masks and self.layout.keeps_only_keys

    def make_step(self, limits: Limits, num_pages: int) -> DeviceStep:
        model, drafter, device = self.model, self.drafter, self.model.device
        pool = DevicePool(self.layout, num_pages, model.dtype, device)
        if drafter is not None:
            drafter.bind(CachedLayers(drafter.attention_layers, pool, self.backend), limits, device)
        state = RowState(limits, self.layout.groups, device)
        return DeviceStep(model, pool, state, self.backend, limits.max_len,
                          recurrent=RecurrentRows(model.recurrent_layers, limits, pool, exact=self.exact,
                                                  takes_checkpoints=self._takes_checkpoints),
                          grammars=GrammarRows(state, limits, self.grammars), drafter=drafter, drafting=self.drafting,
                          synthetic=self.synthetic, logprobs_mode=self.logprobs_mode, exact=self.exact)


def gather_parts(config: EngineConfig, model: Model, drafter: Drafter | None = None,
                 grammars: Grammars | None = None) -> StepParts:
    """`drafter`: one that is already made, instead of the config's. Without `grammars` no request may ask for
    structured output."""
    speculative, device = config.speculative, model.device
    max_drafts = 0 if drafter is None else drafter.max_drafts
    if speculative is not None:
        max_drafts = max(max_drafts, speculative.num_speculative_tokens)
    limits = config.limits(gpu_bytes=gpu_bytes(device), max_positions=model.max_positions,
                           vocab_size=model.vocab_size, max_drafts=max_drafts)
    limits = replace(limits, hidden_size=model.hidden_size)
    if speculative is not None and drafter is None:
        drafter = make_drafter(speculative, draft_build(config, model, limits))
    if config.exact:
        refuse_inexact(config, model)
    backend = choose_backend(config, model, max_drafts)
    layout = plan_cache(config, model, drafter, whole_parts=backend.needs_whole_parts)
    synthetic = None
    if speculative is not None and speculative.synthetic_rates is not None:
        synthetic = SyntheticAcceptance(speculative.synthetic_rates)
        synthetic.bind(limits.max_drafts, device)
    weight_bytes = sum(slot.nbytes for slot in model.weights().values())
    weight_bytes += 0 if drafter is None else drafter.weight_bytes()
    packed_bytes = prepare_all(model, drafter, config)
    return StepParts(model, drafter, DrafterGuards(drafter), synthetic, limits, layout, backend,
                     "processed" if config.logprobs_mode == "processed" else "raw", weight_bytes, packed_bytes,
                     config.enable_prefix_caching, config.exact, grammars)


def draft_build(config: EngineConfig, model: Model, limits: Limits) -> DraftBuild:
    return DraftBuild(model, model.dtype, model.device, limits.max_len, config.load_format, config.seed, config.model,
                      config.keep_quantized)


def prepare_all(model: Model, drafter: Drafter | None, config: EngineConfig) -> int:
    """Prepare the model and its drafter. The drafter comes first, and never exact, since drafts cannot change the text:
    layers that both use are as the model needs them."""
    modules = [] if drafter is None else drafter.modules()
    return prepare(modules, config.packed_weights) + prepare([model], config.packed_weights, config.exact)
