"""StepParts: the model, its drafter and all other objects that steps need, gathered before the number of pages is
known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.cache.groups import CacheLayout
from outrider.core import Limits
from outrider.core.background_work import NO_WORK, BackgroundWork
from outrider.core.lazy_exports import import_attribute
from outrider.drafters.base import Drafter
from outrider.drafters.guard import DrafterGuards
from outrider.mixers import CachedLayers
from outrider.mixers.cached import can_capture
from outrider.mixers.paged.backend import Backend
from outrider.mixers.paged.masks import RangeReach
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.recurrent_rows import RecurrentRows
from outrider.models.base import Model
from outrider.runner.device import name_device
from outrider.runner.memory import FeatureBytes
from outrider.runner.row_state import RowState
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature
from outrider.runner.worker_ranks import ONE_RANK, WorkerRanks
from outrider.sample.sampler import LogprobsMode


@dataclass(frozen=True)
class StepParts:
    """A model, its drafter and all other objects that steps need, except the page pool."""

    model: Model
    drafter: Drafter | None
    drafting: DrafterGuards
    synthetic_rates: tuple[tuple[float, ...], ...] | None  # for measuring: rates of drafts, for rows in turn
    limits: Limits
    layout: CacheLayout
    backend: Backend
    logprobs_mode: LogprobsMode
    weight_bytes: int
    packed_bytes: int
    enable_prefix_caching: bool
    exact: bool
    ranks: WorkerRanks = ONE_RANK
    features: Sequence[WorkerFeature] = ()
    background: BackgroundWork = NO_WORK  # of the features

    @property
    def _takes_checkpoints(self) -> bool:
        return self.enable_prefix_caching and bool(self.layout.recurrent.layers)

    @property
    def edits_logits(self) -> bool:
        """Whether a feature edits the logits of every step, so that none is captured."""
        return any(feature.edits_logits for feature in self.features)

    @property
    def can_be_captured(self) -> bool:
        """Whether steps can be captured as graphs."""
        can_features = all(feature.is_captured for feature in self.features)
        return can_features and not self.edits_logits and can_capture(self.layout, self.backend)

    @property
    def feature_bytes(self) -> dict[str, FeatureBytes]:
        """Device memory of features, by their names."""
        names = [feature.name for feature in self.features]
        return {name if names.count(name) == 1 else f"{name} {index}": feature.num_bytes(self.limits, self.model)
                for index, (name, feature) in enumerate(zip(names, self.features, strict=True))}

    @property
    def device_name(self) -> str:
        return name_device(self.model.device)

    @property
    def takes_extra_keys(self) -> bool:
        """Whether every layer lets tokens attend to later tokens, as inputs with two-way attention need. For a model
        that was trained with them, another backend computes these steps, on a GPU not exactly."""
        layers = self.model.attention_layers
        is_trained = all(getattr(layer, "reach", RangeReach.WHOLE) is not RangeReach.WHOLE for layer in layers)
        return self.layout.keeps_only_keys and (
            self.backend.takes_masks or (is_trained and (self.backend.has_exact_ranges or not self.exact)))

    def make_step(self, limits: Limits, num_pages: int) -> DeviceStep:
        model, drafter, device = self.model, self.drafter, self.model.device
        pool = DevicePool(self.layout, num_pages, model.dtype, device, model.cache_scales)
        if drafter is not None:
            drafter.bind(CachedLayers(drafter.attention_layers, pool, self.backend), limits, device)
        state = RowState(limits, self.layout.groups, device)
        rates = self.synthetic_rates
        step_type: Callable[..., DeviceStep] = DeviceStep if rates is None else partial(
            import_attribute("outrider.runner.synthetic_step:SyntheticStep"), rates)
        step = step_type(model, pool, state, self.backend, limits.max_len,
                         recurrent=RecurrentRows(model.recurrent_layers, limits, pool, exact=self.exact,
                                                 takes_checkpoints=self._takes_checkpoints),
                         drafter=drafter, drafting=self.drafting, logprobs_mode=self.logprobs_mode, exact=self.exact,
                         ranks=self.ranks)
        for feature in self.features:
            feature.attach(step, model, limits)
        return step
