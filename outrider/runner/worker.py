"""Worker: the part of the program that uses the device. It loads the model, captures and measures steps, describes the
model to the engine (`info`), and runs steps.

On a CPU steps run in a second thread; on CUDA they are queued on a stream. The engine sees only a `Runner` with an
`info`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outrider.config import AUTO_DRAFTER, AUTO_METHOD, METHODS, EngineConfig
from outrider.core import Limits, ScheduledBatch, StepResult
from outrider.core.lazy_exports import LateModule
from outrider.core.status_line import status_line
from outrider.drafters.base import Drafter
from outrider.models.base import Model
from outrider.models.loader import Watch, blank_model
from outrider.models.sources.model_source import ModelSource
from outrider.runner import graphs
from outrider.runner.commands import Answer, Command, Errand
from outrider.runner.interface import WorkerDied, WorkerInfo
from outrider.runner.local import LocalRunner, Padding
from outrider.runner.measuring import CAPTURE_ADVICE, bound_prompts, measure_drafting
from outrider.runner.memory import UNMEASURED, StepMemory, enough_memory, fit_max_len, plan_memory, release_dropped
from outrider.runner.parts import StepParts
from outrider.runner.preparation import gather_parts, prepare_all
from outrider.runner.step import DeviceStep
from outrider.runner.target import build_target, fill_target
from outrider.runner.worker_feature import LateFeatures, WorkerFeature
from outrider.runner.worker_ranks import ONE_RANK, WorkerRanks

if TYPE_CHECKING:
    from outrider.runner import residence as residences
else:
    residences = LateModule("outrider.runner.residence")

log = logging.getLogger("outrider")
Prepare = Callable[[Model, Drafter | None], None]
Fill = Callable[[StepParts, EngineConfig], None]
LARGE = 64 << 20  # bytes that are worth a collection, which takes a tenth of a second, when a worker ends on a CPU


class Worker:
    """A loaded model that is ready to run steps."""

    def __init__(self, config: EngineConfig, model: Model, *, eos_ids: tuple[int, ...] = (),
                 drafter: Drafter | None = None, prepare: Prepare = lambda model, drafter: None,
                 fill: Fill = lambda parts, config: None, source: ModelSource | None = None,
                 ranks: WorkerRanks = ONE_RANK) -> None:
        """`drafter`: an existing drafter, used if the config asks for none. `prepare` is called with the model and the
        drafter before anything runs; benchmarks use it to change the experts that routers choose. `fill` loads the
        weights of a model that was built without them, while kernels are compiled. `source`: the files from which
        dropped weights are read again. `ranks`: the ranks that share the model; every rank runs the same steps."""
        if model.device.type == "cuda" and model.device.index is not None:
            torch.cuda.set_device(model.device)  # streams and graphs are made on the current one
        clock = Laps()

        def plan(config: EngineConfig) -> PlannedSteps:
            parts = gather_parts(config, model, drafter, ranks)
            prepare(model, parts.drafter)
            clock.lap("drafter and weights' last touches")
            return PlannedSteps(parts, *_plan_cache(config, parts))

        config, (parts, limits, num_pages, step_memory) = _plan_with_or_without_drafter(config, plan)
        clock.lap("steps collected, kernels begun")
        fill(parts, config)
        clock.lap("weights")
        with enough_memory("the cache", "lower gpu_memory_utilization, num_pages or kv_cache_memory_bytes"):
            self.device_step = parts.make_step(limits, num_pages)
        self.runner = _make_runner(config, parts, self.device_step, limits, step_memory)
        clock.lap("captured steps")
        drafting = measure_drafting(config, self.device_step, limits, self.runner)
        clock.lap("step costs")
        if not isinstance(self.runner, LocalRunner):
            with status_line("compiling kernels"), enough_memory("captured steps", CAPTURE_ADVICE):
                self.runner.capture_prompts()
        prompt_steps = bound_prompts(config, self.device_step, limits, self.runner)
        clock.lap("last kernels, steps with prompts")
        log.info("start-up: %s", clock.report())
        self._make_residence: Callable[[], residences.Residence] = lambda: residences.Residence(
            config, parts, self.device_step, self.runner, source)
        self._late = LateFeatures(config, self.device_step, limits, self.runner)
        self._background = parts.background
        self._background.start()
        self.info = WorkerInfo(limits, parts.layout, num_pages, parts.drafting.lookahead, drafting, eos_ids,
                               prompt_steps, takes_extra_keys=parts.takes_extra_keys, device_name=parts.device_name,
                               classes=model.classes)

    @classmethod
    def load(cls, config: EngineConfig, source: ModelSource, watch: Watch | None = None,
             ranks: WorkerRanks = ONE_RANK) -> Worker:
        model = build_target(config, source, ranks.group)
        if not _needs_no_weights(config, model.device):
            fill_target(model, config, source, watch)
            return cls(config, model, eos_ids=source.eos_token_ids, source=source, ranks=ranks)

        def fill(parts: StepParts, config: EngineConfig) -> None:
            fill_target(model, config, source, watch)
            prepare_all(model, parts.drafter, config)  # again: a layer may be fused by what its weights hold

        blank_model(model)
        return cls(config, model, eos_ids=source.eos_token_ids, source=source, ranks=ranks, fill=fill)

    @cached_property
    def residence(self) -> residences.Residence:
        """The worker's Residence, which keeps track of which parts of its memory are on the device. It is made when
        memory first sleeps or weights first change."""
        return self._make_residence()

    def _can_run(self) -> bool:
        return "residence" not in self.__dict__ or self.residence.can_run

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        return self.runner.submit(batch)

    def command(self, command: Command[Answer]) -> Future[Answer]:
        return self.runner.in_order(partial(self._carry_out, command))

    @torch.no_grad()  # not in inference mode: what a command makes may be changed outside of it later
    def _carry_out(self, command: Command[Answer]) -> Answer:
        return command.carry_out(self)

    def begin(self, errand: Errand) -> Future[Any]:
        try:
            return errand.begin(self)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def feature(self, name: str) -> WorkerFeature:
        """Return the worker's part of a feature that requests ask for; the first call makes it. Any thread may call."""
        if not hasattr(self, "runner"):
            raise WorkerDied(f"the worker has shut down, so {name} cannot be loaded: send the request again later")
        return self._late.need(name)

    def idle(self, quiet_seconds: float) -> float | None:
        return self.runner.idle(quiet_seconds) if self._can_run() else None

    def close(self) -> None:
        """Wait for the steps, and drop the model, the cache and the captured steps, so that their memory is free even
        while an engine or a caller still holds the worker."""
        if not hasattr(self, "runner"):
            return  # closed before
        # Weights that sleep on a GPU have no bytes to count.
        is_large = not isinstance(self.runner, LocalRunner) or self._count_bytes() >= LARGE
        self._background.close()
        self.runner.close()
        self.device_step.close()
        self.__dict__.pop("residence", None)
        del self.runner, self.device_step, self._make_residence, self._background, self._late
        if is_large:
            release_dropped()

    def _count_bytes(self) -> int:
        """Return the bytes of the model's weights and of the cache's pages."""
        step = self.device_step
        return step.pool.data.nbytes + sum(slot.nbytes for slot in step.model.weights().values())

    @property
    def num_padded_steps(self) -> int:
        return self.runner.num_padded_steps

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """A context in which no step replays a graph, so that hooks on the model's layers see every step."""
        if isinstance(self.runner, LocalRunner):
            yield
            return
        graphs, self.runner.graphs = self.runner.graphs, None
        try:
            yield
        finally:
            self.runner.graphs = graphs


class PlannedSteps(NamedTuple):
    parts: StepParts
    limits: Limits  # perhaps with a shorter length than the config's
    num_pages: int
    step_memory: StepMemory  # see `_plan_cache`


def _plan_with_or_without_drafter(
    config: EngineConfig, plan: Callable[[EngineConfig], PlannedSteps]
) -> tuple[EngineConfig, PlannedSteps]:
    """Plan the steps, and return the plan with its config. If there is no memory for the drafter that comes with the
    model, the plan and the config are made without the drafter."""
    drafter = config.shipped_drafter
    if drafter is None:
        if config.speculative_config == AUTO_DRAFTER:
            log.warning("speculative_config='auto': the package has no drafter for %s, so no drafts are made; name "
                        "a method, such as {'method': 'ngram', 'num_speculative_tokens': 4}", config.model)
        return config, plan(config)
    obstacle = config.shipped_drafter_obstacle
    if not obstacle:
        try:
            planned = plan(config)
        except ValueError as error:
            if config.adapt_drafter:  # a drafter is asked for
                raise
            obstacle = str(error)
        else:
            log.info("%s comes with a drafter, which guesses up to %d tokens a step (off: speculative_config=None, "
                     "--speculative-config none)", config.model, drafter.num_drafts)
            return config, planned
    log.warning("%s runs without the drafter that comes with it: %s", config.model, obstacle)
    bare = replace(config, speculative_config=None)
    return bare, plan(bare)


def _needs_no_weights(config: EngineConfig, device: torch.device) -> bool:
    """Whether kernels can be compiled before weights are read. On a GPU they can, because weight formats are known from
    the files' headers and decide which kernels are needed. A drafter from outside the package is the exception: it may
    look at the target's weights."""
    return device.type == "cuda" and all(method in (AUTO_METHOD, *METHODS) for method in config.draft_methods)


def _plan_cache(config: EngineConfig, parts: StepParts) -> tuple[Limits, int, StepMemory]:
    """Plan the cache. Returns the limits, perhaps with a smaller `max_len`; the number of pages; and the memory that a
    step takes, or UNMEASURED if no step was measured for these limits. The measurement also starts to compile
    kernels."""
    limits, device, step_memory = parts.limits, parts.model.device, UNMEASURED
    if device.type == "cuda" and config.fits_cache_to_device:
        use_graphs = not config.enforce_eager and parts.can_be_captured
        with status_line("measuring the largest step"):
            step_memory = graphs.measure_step_memory(lambda: parts.make_step(limits, 2), limits, device,
                                                     use_graphs=use_graphs)
    plan = plan_memory(config, parts.layout, limits, device, weight_bytes=parts.weight_bytes,
                       packed_bytes=parts.packed_bytes, step=step_memory, ranks=parts.ranks,
                       feature_bytes=parts.feature_bytes)
    log.info("%s", plan.report())
    fitting = fit_max_len(config, parts.layout, limits, plan)
    return fitting, plan.num_pages, step_memory if fitting == limits else UNMEASURED


def _make_runner(config: EngineConfig, parts: StepParts, step: DeviceStep, limits: Limits,
                 step_memory: StepMemory) -> LocalRunner | graphs.CudaRunner:
    padding = Padding(config.pad_requests, config.pad_tokens)
    if step.state.device.type != "cuda":
        return LocalRunner(step, padding)
    runner = graphs.CudaRunner(step, limits, use_graphs=not config.enforce_eager, padding=padding)
    with status_line("compiling kernels and capturing steps"), enough_memory("captured steps", CAPTURE_ADVICE):
        if step_memory is UNMEASURED:
            runner.begin_compiling()
        runner.capture_decoding(reserved_bytes=step_memory.activation_bytes)
    return runner


class Laps:
    """Measures how long each part of a task takes."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps.append((name, now - self._last))
        self._last = now

    def report(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._laps)
