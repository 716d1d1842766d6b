"""From a config to a running engine: the one place where all parts meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.cache.groups import CacheLayout, plan_groups
from outrider.cache.kinds import RecurrentSpec
from outrider.cache.manager import CacheManager
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.core import Limits
from outrider.engine.engine import Engine
from outrider.engine.text import Tokenizer, TokenizerError
from outrider.layers.fuse import prepare
from outrider.mixers.cached import CachedLayers
from outrider.mixers.paged.base import Backend
from outrider.mixers.paged.registry import make_backend
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.rows import RecurrentRows
from outrider.models.base import Model
from outrider.models.loader import load_dummy, load_weights
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.models.sources.base import ModelSource
from outrider.runner.graphs.costs import measure_costs
from outrider.runner.graphs.cuda_runner import CudaRunner
from outrider.runner.graphs.warm_up import measure_step_memory
from outrider.runner.local import LocalRunner, Padding, Runner
from outrider.runner.memory import enough_memory, fit_max_len, plan_memory
from outrider.runner.rows import RowState
from outrider.runner.step import DeviceStep
from outrider.sample.sampler import LogprobsMode
from outrider.sched.drafts import DraftCounts, FixedDrafts, auto_drafts
from outrider.sched.scheduler import Scheduler
from outrider.spec.base import Drafter
from outrider.spec.registry import DraftBuild, make_drafter
from outrider.spec.scripted import SyntheticAcceptance
from outrider.spec.suffix import SuffixDrafter

log = logging.getLogger("outrider")
Prepare = Callable[[Model, Drafter | None], None]


def build_engine(config: EngineConfig) -> Engine:
    device = pick_device(config.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are made on the current one
    source = resolve(config.model, weights=config.load_format != "dummy")
    dtype = pick_dtype(config.dtype, source, device)
    with enough_memory("the weights", "choose a smaller model or dtype, or free what else is on the device"):
        model = build_model(source.config, dtype=dtype, device=device, max_len=config.max_model_len, source=source.name)
    if config.load_format == "dummy":
        load_dummy(model, config.seed)
    else:
        load_weights(model, source.read(keep_quantized=config.keep_quantized))
    return assemble(config, model, device, tokenizer=load_tokenizer(source), eos_ids=source.eos_token_ids)


def assemble(config: EngineConfig, model: Model, device: torch.device, *, tokenizer: Tokenizer | None = None,
             eos_ids: tuple[int, ...] = (), drafter: Drafter | None = None,
             prepare: Prepare | None = None) -> Engine:
    """An engine around a model that is already loaded, and around a drafter where the config does not make one.
    `prepare` gets both before anything runs: benchmarks change what routers choose."""
    clock = Laps()
    parts = _gather(config, model, device, drafter)
    if prepare is not None:
        prepare(model, parts.drafter)
    clock.lap("drafter and weights' last touches")
    limits, num_pages, is_compiled = _plan_cache(config, parts)
    clock.lap("kernels and the largest step")
    with enough_memory("the cache", "lower gpu_memory_utilization, num_pages or kv_cache_memory_bytes"):
        step = parts.make_step(limits, num_pages)
    runner = _make_runner(config, parts, step, limits, is_compiled)
    clock.lap("captured steps")
    counts = _draft_counts(config.speculative, step, limits, runner)
    clock.lap("step costs")
    log.info("start-up: %s", clock.report())
    cache = CacheManager(parts.layout, num_pages, limits, enable_prefix_caching=config.enable_prefix_caching,
                         lookahead=0 if parts.drafter is None else parts.drafter.lookahead)
    scheduler = Scheduler(cache, limits, drafts=counts, host_drafter=_host_drafter(config.speculative))
    return Engine(scheduler, runner, limits, tokenizer=tokenizer, eos_ids=eos_ids, seed=config.seed,
                  max_logprobs=config.max_logprobs, submits_early=config.overlap is not False)


@dataclass(frozen=True)
class Parts:
    """What a step is made of, before it is known how many pages there will be."""

    model: Model
    drafter: Drafter | None
    synthetic: SyntheticAcceptance | None
    limits: Limits
    layout: CacheLayout
    backend: Backend
    logprobs_mode: LogprobsMode
    weight_bytes: int
    packed_bytes: int

    def make_step(self, limits: Limits, num_pages: int) -> DeviceStep:
        model, drafter, device = self.model, self.drafter, self.model.device
        pool = DevicePool(self.layout, num_pages, model.dtype, device)
        if drafter is not None:
            drafter.bind(CachedLayers(drafter.attention_layers, pool, self.backend), limits, num_pages, device)
        return DeviceStep(model, pool, RowState(limits, self.layout.groups, device), self.backend, limits.max_len,
                          recurrent=RecurrentRows(getattr(model, "recurrent_layers", {}), limits, pool),
                          drafter=drafter, synthetic=self.synthetic, logprobs_mode=self.logprobs_mode)


def _gather(config: EngineConfig, model: Model, device: torch.device, drafter: Drafter | None) -> Parts:
    speculative = config.speculative
    max_drafts = 0 if drafter is None else drafter.max_drafts
    if speculative is not None:
        max_drafts = max(max_drafts, speculative.num_speculative_tokens)
    limits = config.limits(on_cuda=device.type == "cuda", max_positions=model.max_positions,
                           vocab_size=model.vocab_size, max_drafts=max_drafts)
    if speculative is not None and drafter is None:
        build = DraftBuild(model, model.dtype, device, limits.max_len, config.load_format, config.seed, config.model)
        drafter = make_drafter(speculative, build)
    own_layers = [] if drafter is None else drafter.cache_layers()
    if drafter is not None and any(isinstance(layer.spec, RecurrentSpec) for layer in own_layers):
        raise ValueError(f"drafter {drafter.name!r} has recurrent layers, which only a target can have: choose another")
    layout = plan_groups(model.cache_layers(), config.page_size, config.checkpoint_interval, own_layers)
    synthetic = None
    if speculative is not None and speculative.synthetic_rates is not None:
        synthetic = SyntheticAcceptance(speculative.synthetic_rates)
        synthetic.bind(limits.max_drafts, device)
    weight_bytes = sum(slot.nbytes for slot in model.weights().values())
    weight_bytes += 0 if drafter is None else drafter.weight_bytes()
    packed_bytes = prepare([model, *([] if drafter is None else drafter.modules())], config.packed_weights)
    return Parts(model, drafter, synthetic, limits, layout, pick_backend(config, model, max_drafts),
                 "processed" if config.logprobs_mode == "processed" else "raw", weight_bytes, packed_bytes)


def _plan_cache(config: EngineConfig, parts: Parts) -> tuple[Limits, int, bool]:
    """(the limits, perhaps with a shorter length; the number of pages; whether kernels were compiled on the way)"""
    limits, device, step_memory = parts.limits, parts.model.device, None
    if device.type == "cuda" and config.num_pages is None and config.kv_cache_memory_bytes is None:
        extra = 0 if parts.drafter is None else parts.drafter.page_bytes(parts.model.dtype.itemsize)
        step_memory = measure_step_memory(lambda: parts.make_step(limits, 2), limits, device,
                                          use_graphs=not config.enforce_eager, page_extra_bytes=extra,
                                          takes_checkpoints=_takes_checkpoints(config, parts))
    plan = plan_memory(config, parts.layout, limits, device, weight_bytes=parts.weight_bytes,
                       packed_bytes=parts.packed_bytes, step=step_memory)
    log.info("%s", plan.report())
    fitting = fit_max_len(config, parts.layout, limits, plan)
    return fitting, plan.num_pages, step_memory is not None and fitting == limits


def _takes_checkpoints(config: EngineConfig, parts: Parts) -> bool:
    return config.enable_prefix_caching and bool(parts.layout.recurrent.layers)


def _make_runner(config: EngineConfig, parts: Parts, step: DeviceStep, limits: Limits, is_compiled: bool) -> Runner:
    padding = Padding(config.pad_requests, config.pad_tokens)
    if step.state.device.type != "cuda":
        return LocalRunner(step, padding)
    runner = CudaRunner(step, limits, use_graphs=not config.enforce_eager, padding=padding)
    with enough_memory("captured steps", "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"):
        runner.warm_up(takes_checkpoints=_takes_checkpoints(config, parts), is_compiled=is_compiled)
    return runner


class Laps:
    """How long each part of something took."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps.append((name, now - self._last))
        self._last = now

    def report(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._laps)


def _draft_counts(speculative: SpeculativeConfig | None, step: DeviceStep, limits: Limits,
                  runner: Runner) -> DraftCounts | None:
    if speculative is None:
        return None if step.drafter is None else FixedDrafts(step.drafter.max_drafts)
    k = speculative.num_speculative_tokens
    if not speculative.auto:
        return FixedDrafts(k)
    costs = measure_costs(step, limits, runner if isinstance(runner, CudaRunner) else None)
    log.info("step costs in ms by tokens: %s; of a proposal by requests: %s",
             ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in zip(costs.tokens, costs.seconds, strict=True)),
             ", ".join(f"{n}: {first * 1e3:.2f} + {each * 1e3:.2f} for each further draft"
                       for n, first, each in costs.drafting) or "nothing")
    has_layers = step.drafter is not None and bool(step.drafter.attention_layers)
    return auto_drafts(k, costs, always_propose=not has_layers)


def _host_drafter(speculative: SpeculativeConfig | None) -> SuffixDrafter | None:
    return SuffixDrafter() if speculative is not None and "suffix" in speculative.methods else None


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device='cuda', but this machine has no CUDA device that torch can use; use device='cpu'")
    return torch.device(name)


def pick_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """Auto: as the checkpoint says on a GPU; float32 on a CPU, where narrower types are slow."""
    if name == "auto":
        name = str(source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if device.type == "cpu":
            name = "float32"
    if device.type != "cpu" and name == "float64":
        raise ValueError("dtype='float64' is for exact checks on the CPU; use float32 or bfloat16 on a GPU")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
            "float64": torch.float64}[name]


def pick_backend(config: EngineConfig, model: Model, max_drafts: int = 0) -> Backend:
    return make_backend(config.attention_backend, model.device, model.dtype, max_drafts)


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """None, with a warning, where there are no tokenizer files: token ids in, token ids out still works."""
    try:
        return Tokenizer.load(source.tokenizer())
    except TokenizerError as error:
        log.warning("no tokenizer: %s", error)
        return None
