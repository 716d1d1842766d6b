"""Finds the best plan that fits a device's memory.

A candidate is a form (quantization of weights and cache) with a pace (requests at once and tokens of a step). The
longest context that fits is computed for each candidate, as a starting engine would compute it. Plans are compared by
`FitPlan.merit`. With more memory no candidate gets worse, so the best plan does not get worse either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from outrider.cache.groups import CacheLayout
from outrider.config import CPU_CACHE_BYTES, CPU_CACHE_SHARE, EngineConfig, default_requests
from outrider.core import Limits
from outrider.fitting.forms import USUAL_CONTEXT, Form, forms_for
from outrider.fitting.outline import ModelOutline
from outrider.fitting.room import DeviceRoom
from outrider.models.sources.gguf import GgufSource
from outrider.models.sources.model_source import ModelSource
from outrider.models.sources.quantization import quantization_section
from outrider.runner.interface import NoDeviceMemory
from outrider.runner.memory import (
    LEAST_PAGES,
    MemoryPlan,
    longest_request,
    pages_within,
    taken_beside_pages,
)

LEAST_CONTEXT = 256  # tokens: a plan with fewer serves nobody
LEAST_SAVING = 0.02  # a form of weights that saves a smaller share of them is left out


@dataclass(frozen=True)
class StepPace:
    """The number of requests at once and of tokens in a step. A slower pace takes less memory and more time, and never
    changes a token."""

    requests: int | None = None  # None: as the config has it by default
    tokens: int | None = None
    is_eager: bool = False  # no graphs
    has_packed: bool = True  # CPU: second copies of weights
    has_drafts: bool = True  # the drafter that comes with the model

    def apply(self, config: EngineConfig) -> EngineConfig:
        """Return the config with this pace. Settings that the user gave are kept."""
        requests, tokens = config.max_num_seqs or self.requests, config.max_num_batched_tokens or self.tokens
        if config.max_num_batched_tokens is not None and requests is not None and config.max_num_seqs is None:
            requests = min(requests, config.max_num_batched_tokens)
        if tokens is not None and requests is not None and config.max_num_batched_tokens is None:
            drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
            tokens = max(tokens, requests * (1 + drafts))
        config = replace(config, max_num_seqs=requests, max_num_batched_tokens=tokens,
                         enforce_eager=config.enforce_eager or self.is_eager,
                         packed_weights=config.packed_weights and self.has_packed)
        return config if self.has_drafts or config.shipped_drafter is None else config.without_drafts()


GPU_PACES = (
    StepPace(), StepPace(256, 8192), StepPace(128, 4096), StepPace(64, 2048), StepPace(32, 1024), StepPace(16, 512),
    *(StepPace(num, tokens, has_drafts=False) for num, tokens in ((16, 512), (8, 512), (4, 256))),
    StepPace(2, 256, is_eager=True, has_drafts=False),
)
CPU_PACES = (StepPace(), StepPace(16), StepPace(16, has_packed=False), StepPace(8, 256, has_packed=False),
             StepPace(4, 128, has_packed=False, has_drafts=False))


@dataclass(frozen=True)
class FitPlan:
    config: EngineConfig  # with the chosen settings, max_model_len among them
    form: Form
    pace: int  # its place in the order of paces: 0 is the fastest
    memory: MemoryPlan
    held_bytes: int  # by the model: weights, packed copies, tables
    other_bytes: int  # by steps, rows and features
    budget: int
    max_positions: int
    limits: Limits
    layout: CacheLayout = field(repr=False)

    @property
    def context(self) -> int:
        return self.limits.max_len

    @property
    def pool_bytes(self) -> int:
        return self.memory.num_pages * self.memory.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.held_bytes + self.other_bytes + self.pool_bytes

    @cached_property
    def full_requests(self) -> int:
        """The number of requests with the whole context that the cache holds at once."""
        each = max(1, _pages_of(self.layout, self.limits))
        return min(self.limits.max_requests, (self.memory.num_pages - 1) // each)

    @property
    def merit(self) -> tuple[int, float, int, int, int]:
        """The sort key of plans; the greatest is best. Compared in this order: the context, up to the length that is
        worth the form's rounding; little quality loss; the context up to a usual length; a fast pace; the whole
        context."""
        return (self._tier(self.form.worth_context), -self.form.loss, self._tier(USUAL_CONTEXT), -self.pace,
                self.context)

    def _tier(self, most: int) -> int:
        """Return the context for comparisons, at most `most`. A shorter context is rounded down to a power of two, so
        that a few more tokens do not justify another form."""
        most = min(most, self.max_positions)
        return most if self.context >= most else 1 << (self.context.bit_length() - 1)


@dataclass(frozen=True)
class Need:
    """The least memory with which a form and a pace serve requests of one length, and the parts of this memory."""

    settings: dict[str, object]  # those that may be chosen
    length: int
    num_full: int
    held_bytes: int
    other_bytes: int
    pool_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.held_bytes + self.other_bytes + self.pool_bytes

    def describe(self) -> str:
        held, other, pool = (part / (1 << 30) for part in (self.held_bytes, self.other_bytes, self.pool_bytes))
        return (f"weights {held:.2f}, steps and rows {other:.2f}, the cache of {self.num_full} "
                f"request{'s' * (self.num_full > 1)} of {self.length} tokens {pool:.2f}")


class Search:
    """Searches the plans of one model on one device."""

    def __init__(self, config: EngineConfig, source: ModelSource, room: DeviceRoom, num_full: int = 1) -> None:
        """num_full: the number of requests with the whole context that the cache must hold at once."""
        if config.adapt_drafter:
            raise ValueError("fit: adapt_drafter takes memory that is measured at start: leave one of them out")
        self._config, self._source, self.room, self._num_full = config, source, room, num_full
        self.budget = room.budget(config.gpu_memory_utilization)
        self._outlines: dict[str, ModelOutline] = {}
        self._layouts: dict[str, CacheLayout] = {}

    def elsewhere(self, room: DeviceRoom) -> Search:
        """Return the search for another device of the same kind. It shares the outlines of this search, which are slow
        to build."""
        other = Search(self._config, self._source, room, self._num_full)
        assert (room.device, room.capability) == (self.room.device, self.room.capability)
        other._outlines, other._layouts = self._outlines, self._layouts
        return other

    @cached_property
    def best(self) -> FitPlan:
        found: FitPlan | None = None
        for form, index in self._candidates():
            if found is None or found.merit < self._best_merit(form, index):
                plan = self.plan(form, self.paces[index], index)
                found = plan if found is None or (plan is not None and plan.merit > found.merit) else found
        if found is None:
            raise NoDeviceMemory(self.obstacle())
        return found

    def plans(self) -> Iterator[FitPlan]:
        """Yield the plan with the longest context for every candidate that fits."""
        found = (self.plan(form, self.paces[index], index) for form, index in self._candidates())
        return (plan for plan in found if plan is not None)

    def _candidates(self) -> Iterator[tuple[Form, int]]:
        return ((form, index) for form in self.forms for index in range(len(self.paces)))

    def _best_merit(self, form: Form, pace: int) -> tuple[int, float, int, int, int]:
        """Return the merit that a candidate would have with unlimited memory. Candidates that could not win are
        skipped."""
        most = self._outline(self._config).model.max_positions
        return min(form.worth_context, most), -form.loss, min(USUAL_CONTEXT, most), -pace, most

    @cached_property
    def forms(self) -> list[Form]:
        """The forms that this model can have on this device. A form that hardly makes the weights smaller is left out.
        """
        found: list[Form] = []
        is_quantised = isinstance(self._source, GgufSource) or bool(quantization_section(self._source.config))
        plain = self._outline(self._config).weight_bytes
        for form in forms_for(self._config, on_gpu=self.room.is_gpu, converts_to_fp8=self.room.converts_to_fp8):
            if form.weights is not None and is_quantised:
                continue
            try:
                outline = self._outline(self._in_form(form))
                outline.layout(self._in_form(form))
            except ValueError:  # a layer of the model, or the device, cannot have it
                if not form.rounded:
                    raise
                continue
            if form.weights is None or outline.weight_bytes < (1 - LEAST_SAVING) * plain:
                found.append(form)
        return found

    def plan(self, form: Form, pace: StepPace, index: int = 0) -> FitPlan | None:
        """Return a candidate's plan with the longest context that fits; None if none fits."""
        config = pace.apply(self._in_form(form))
        if config.max_num_seqs is not None and config.max_num_seqs < self._num_full:
            config = replace(config, max_num_seqs=self._num_full)
        outline = self._outline(config)
        low, high = 0, self._config.max_model_len or outline.model.max_positions
        if self._config.max_model_len is not None:
            return self._plan_of(outline, config, form, index, high)
        best = self._plan_of(outline, config, form, index, high)
        while best is None and low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self._plan_of(outline, config, form, index, middle) else (low, middle)
        least = min(LEAST_CONTEXT, outline.model.max_positions)
        return best or (self._plan_of(outline, config, form, index, low) if low >= least else None)

    def _plan_of(self, outline: ModelOutline, config: EngineConfig, form: Form, pace: int,
                 length: int) -> FitPlan | None:
        """Return the plan for requests of this length; None if they do not fit."""
        config = replace(config, max_model_len=length)
        layout, limits = outline.layout(config), outline.limits(config, self.room.gpu_bytes)
        features = outline.feature_bytes(config, limits)
        step, held = outline.step_memory(config, limits), outline.held_bytes(config, limits)
        other = taken_beside_pages(layout, limits, step, features, on_gpu=self.room.is_gpu)
        left = self.budget - held - other
        num_pages = self._num_pages(config, layout, limits, left)
        if num_pages < LEAST_PAGES or num_pages * layout.page_bytes > left:
            return None
        is_short = _pages_of(layout, limits) * self._num_full >= num_pages
        if is_short or longest_request(layout, limits, num_pages) < length:
            return None
        memory = MemoryPlan.from_pages(num_pages, layout, limits, weight_bytes=outline.weight_bytes,
                                       packed_bytes=outline.packed_bytes(config), step=step, feature_bytes=features)
        return FitPlan(config, form, pace, memory, held, other, self.budget, outline.model.max_positions, limits,
                       layout)

    def _num_pages(self, config: EngineConfig, layout: CacheLayout, limits: Limits, left: int) -> int:
        """Return the number of pages of the pool. On a CPU it is at most the default, unless requests need more,
        because other programs use the memory too."""
        if config.num_pages is not None:
            return config.num_pages
        if config.kv_cache_memory_bytes is not None:
            return pages_within(config, layout, limits, config.kv_cache_memory_bytes)
        if self.room.is_gpu:
            return pages_within(config, layout, limits, left)
        usual = min(CPU_CACHE_BYTES, int(left * CPU_CACHE_SHARE)) // layout.page_bytes
        needed = self._num_full * _pages_of(layout, limits) + 1
        return min(pages_within(config, layout, limits, left), max(usual, needed))

    def _in_form(self, form: Form) -> EngineConfig:
        """Return the config with this form's settings. On a GPU a quantised float16 model runs in bfloat16, because
        kernels multiply codes with bfloat16 only."""
        config = form.apply(self._config)
        named = self._source.config.get("dtype") or self._source.config.get("torch_dtype")
        is_float16 = config.dtype == EngineConfig.dtype and str(named).removeprefix("torch.") == "float16"
        return replace(config, dtype="bfloat16") if form.weights and is_float16 and self.room.is_gpu else config

    def _outline(self, config: EngineConfig) -> ModelOutline:
        """Return the outline for a config. Configs that differ only in context, pace or cache dtype share an outline.
        """
        key = f"{config.quantization} {config.dtype} {config.speculative_config}"
        if key not in self._outlines:
            kept = replace(self._config, quantization=config.quantization, dtype=config.dtype,
                           speculative_config=config.speculative_config)
            self._outlines[key] = ModelOutline.build(kept, self._source, self.room, self._layouts)
        return self._outlines[key]

    @cached_property
    def paces(self) -> list[StepPace]:
        """The paces that lead to different settings with this config, the fastest first."""
        found: dict[str, StepPace] = {}
        usual = default_requests(self.room.gpu_bytes)
        for pace in GPU_PACES if self.room.is_gpu else CPU_PACES:
            if pace.requests is None or pace.requests <= usual:
                found.setdefault(repr(pace.apply(self._config)), pace)
        return list(found.values())

    def need(self, form: Form, pace: StepPace, length: int | None = None) -> Need:
        """Return the least memory that a candidate needs. length: tokens of a request; by default the length that the
        config asks for."""
        config = pace.apply(self._in_form(form))
        outline = self._outline(config)
        length = length or self._config.max_model_len or outline.model.max_positions
        config = replace(config, max_model_len=length)
        layout, limits = outline.layout(config), outline.limits(config, self.room.gpu_bytes)
        other = taken_beside_pages(layout, limits, outline.step_memory(config, limits),
                                   outline.feature_bytes(config, limits), on_gpu=self.room.is_gpu)
        pool = (self._num_full * _pages_of(layout, limits) + 1) * layout.page_bytes
        settings: dict[str, object] = {"quantization": config.quantization, "dtype": config.dtype,
                                      "kv_cache_dtype": config.kv_cache_dtype,
                                      "max_num_seqs": limits.max_requests,
                                      "max_num_batched_tokens": limits.max_batched_tokens,
                                      "enforce_eager": config.enforce_eager, "packed_weights": config.packed_weights}
        return Need(settings, length, self._num_full, outline.held_bytes(config, limits), other, pool)

    def obstacle(self) -> str:
        """Say why nothing fits, with the bytes of the candidate that needs least."""
        length = self._config.max_model_len or LEAST_CONTEXT
        need = min((self.need(form, self.paces[-1], length) for form in self.forms), key=lambda need: need.total_bytes)
        if need.total_bytes <= self.budget:  # then the size of the cache was given
            return (f"kv_cache_memory_bytes or num_pages leave too little for {self._num_full} request"
                    f"{'s' * (self._num_full > 1)} of {need.length} tokens, which need{'s' * (self._num_full == 1)} "
                    f"{need.pool_bytes} bytes: leave them out, or give more")
        return (f"{self._config.model} does not fit {self.room.name} in any form that was tried: the engine may take "
                f"{self.budget / (1 << 30):.2f} GiB and needs at least {need.total_bytes / (1 << 30):.2f} "
                f"({need.describe()}): choose a smaller model, a device with more memory, or several "
                "(--tensor-parallel-size)")


def _pages_of(layout: CacheLayout, limits: Limits) -> int:
    """Return the number of pages that a request of the greatest length needs."""
    return sum(group.kind.pages_to_start(limits.max_len, limits) for group in layout.groups)
