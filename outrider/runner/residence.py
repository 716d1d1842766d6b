"""Residence: keeps track of which parts of a worker's memory are on the device. It puts weights and cache to sleep,
wakes them, and replaces weights.

Layers and mixers need no code for this: their tensor objects stay, and only the memory behind them is freed. Captured
steps hold addresses and numbers of the weights, so they are dropped and captured again."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from outrider import drafters
from outrider.config import AUTO_METHOD, METHODS, EngineConfig
from outrider.core.lazy_exports import LateModule
from outrider.layers import LayeredModule, Linear, find_modules
from outrider.layers.fuse import restore_order
from outrider.models.head import DraftHead
from outrider.models.loader import some_names
from outrider.models.sources.model_source import ModelSource, WeightError
from outrider.models.sources.quantization import quantization_section
from outrider.runner.commands import (
    KV_CACHE,
    PARTS,
    WEIGHTS,
    NamedArray,
    NamedTensor,
    SleepReport,
    UpdateReport,
    UpdateWeights,
    WakeReport,
    WeightsIncomplete,
)
from outrider.runner.local import LocalRunner
from outrider.runner.memory import collect_replaced
from outrider.runner.parts import StepParts
from outrider.runner.preparation import draft_build, prepare_all
from outrider.runner.step import DeviceStep
from outrider.runner.storages import FreedMemory, find_storages, release_copies
from outrider.runner.target import fill_target

if TYPE_CHECKING:
    from outrider.core.weights_checksum import WeightsChecksum
    from outrider.runner import weight_digests, weight_update
    from outrider.runner.graphs.cuda_runner import CudaRunner
else:
    weight_digests = LateModule("outrider.runner.weight_digests")
    weight_update = LateModule("outrider.runner.weight_update")

log = logging.getLogger("outrider")
MIB = 1 << 20
ALL_NEEDED = "no request is served until an update with all weights succeeds"


class Residence:
    def __init__(self, config: EngineConfig, parts: StepParts, step: DeviceStep, runner: LocalRunner | CudaRunner,
                 source: ModelSource | None) -> None:
        """source: the files from which dropped weights are read again; None: only an update can bring them back."""
        self._config, self._parts, self._step, self._runner, self._source = config, parts, step, runner, source
        self._asleep: dict[str, list[FreedMemory]] = {}
        self._are_incomplete = False  # the weights were dropped, or an update of them failed half-way
        self._stream: weight_update.WeightStream | None = None  # an update that has begun
        self._was_incomplete = False  # before that update
        self._doubtful: set[str] = set()  # weights that failed updates have replaced
        self._are_unread = False  # the weights were dropped and are awake; no file was read, because an update may come
        self._are_updated = False  # the weights are those of an update, not of the files
        self._lacks_captures = False  # captured steps were dropped, and not captured again
        self._packed_bytes = parts.packed_bytes  # of second copies of weights, and of others that formats hold

    @property
    def asleep(self) -> Collection[str]:
        return self._asleep.keys()

    @property
    def can_run(self) -> bool:
        """Whether steps can run: everything is on the device, and all weights belong to one version of the model."""
        return not self._asleep and not self._are_incomplete

    def sleep(self, level: int) -> SleepReport:
        """Put all parts to sleep. If an error is raised before memory is freed, all parts stay awake."""
        with self._background_paused():
            return self._sleep(level)

    @contextmanager
    def _background_paused(self) -> Iterator[None]:
        """A context that pauses background work, which may read weights of the model and the drafter. The work resumes
        afterwards only if nothing sleeps and the weights are complete."""
        self._parts.background.pause()
        try:
            yield
        finally:
            if self.can_run:
                self._parts.background.resume()

    def _sleep(self, level: int) -> SleepReport:
        start = time.perf_counter()
        self._synchronize()
        num_packed = self._drop_packed() if level == 2 else 0
        falling: dict[str, list[FreedMemory]] = {}
        if WEIGHTS not in self._asleep:
            falling[WEIGHTS] = self._weights_to_free(level)
        if KV_CACHE not in self._asleep:
            falling[KV_CACHE] = [FreedMemory(find_storages(self._cache_tensors()).values(), keeps=False)]
        self._drop_captures()
        num_total = num_packed + sum(own[0].total_bytes for own in falling.values())
        num_freed = num_packed
        if level == 2 and WEIGHTS in self._asleep:
            num_dropped = self._asleep[WEIGHTS][0].drop_content()
            num_total, num_freed = num_total + num_dropped, num_freed + num_dropped
        if self._stream is not None:
            self._doubt(self._stream.came)
        self._are_incomplete |= level == 2
        self._are_unread, self._stream = False, None
        self._asleep |= falling
        for first, *others in falling.values():
            num_freed += first.free()
            for memory in others:
                memory.free()
        self._release()
        report = SleepReport(num_total, num_freed,
                             sum(memory.host_bytes for own in falling.values() for memory in own),
                             time.perf_counter() - start)
        log.info("asleep at level %d: %.0f of %.0f MiB of weights and cache are free, %.0f MiB were copied to the "
                 "host's memory; %.2f s", level, report.freed_bytes / MIB, report.total_bytes / MIB,
                 report.host_bytes / MIB, report.seconds)
        return report

    def wake_up(self, parts: Collection[str] = PARTS) -> WakeReport:
        """Bring parts back to the device. If a part fails, this part and the parts after it stay asleep. Dropped
        weights are read from their files when the last part wakes up: if only weights wake up, an update of the weights
        may follow."""
        with self._background_paused():
            return self._wake_up(parts)

    def _wake_up(self, parts: Collection[str]) -> WakeReport:
        start = time.perf_counter()
        wakes_all, were_read = self._asleep.keys() <= set(parts), False
        for part in (part for part in PARTS if part in parts and part in self._asleep):
            # The first tensor of an update has restored the memory.
            is_streamed = part == WEIGHTS and self._stream is not None and self._stream.has_begun
            self._are_unread |= part == WEIGHTS and self._are_incomplete and not is_streamed
            try:
                if not is_streamed:
                    self._restore(part)
                if wakes_all and self._are_unread:
                    self._read_weights()
                    were_read = True
            except BaseException:
                self._free_again(part)
                self._are_unread &= part != WEIGHTS
                raise
            del self._asleep[part]
        self._release()
        num_captured, seconds = self._capture_again()
        report = WakeReport(time.perf_counter() - start, num_captured, seconds, not self._are_incomplete, were_read)
        log.info("awake: %s in %.2f s, of which %d captured steps took %.2f s", ", ".join(parts), report.seconds,
                 num_captured, seconds)
        return report

    def update_weights(self, given: UpdateWeights) -> UpdateReport:
        """Replace weights. All tensors are checked before any weight changes. If the update fails, weights that were
        asleep go back to sleep."""
        with self._background_paused():
            return self._update_weights(given)

    def _update_weights(self, given: UpdateWeights) -> UpdateReport:
        start = time.perf_counter()
        self._synchronize()
        try:
            self._restore(WEIGHTS)  # slots are views
            stored = {} if self._source is None else quantization_section(self._source.config)
            update = weight_update.WeightUpdate(self._updated_weights(), given, stored)
            names = update.check()
            self._check_whole(update, names)
        except BaseException:
            self._free_again(WEIGHTS)
            raise
        self._begin_update(given.keeps_rows)
        try:
            restore_order([self._parts.model, *self._modules()])
            update.store()
            self._complete(names)
        except BaseException as error:
            self._doubt(names)
            raise WeightsIncomplete(f"an update of weights failed after some were changed ({error!r}): "
                                    f"{ALL_NEEDED}") from error
        return self._end_update(len(names), start)

    def _check_whole(self, update: weight_update.WeightUpdate, names: Collection[str]) -> None:
        """Raise WeightError if the update would leave the model without some of its weights. If weights were only
        dropped, they are read from the files first."""
        if self._are_incomplete and self._are_unread and not update.is_whole(names, self._doubtful):
            self._read_weights()
        if self._are_incomplete:
            update.check_whole(names, self._doubtful)

    def stream_weight(self, given: NamedArray | NamedTensor, *, keeps_rows: bool = False) -> None:
        """Replace one weight of an update whose tensors come one by one. A first tensor that does not fit changes
        nothing. A later tensor that does not fit ends the update and leaves the weights incomplete."""
        with self._background_paused():
            start = time.perf_counter()
            self._stream = stream = self._stream or self._open_stream()
            try:
                tensor = given.tensor if isinstance(given, NamedTensor) else weight_update.as_tensor(given)
                stream.take(given.name, tensor, partial(self._begin_stream, stream, keeps_rows))
                self._synchronize()  # the tensor is the caller's again
            except BaseException as error:
                self._stream = None
                if not stream.has_begun:
                    self._free_again(WEIGHTS)
                    raise
                self._doubt(stream.came)
                raise WeightsIncomplete(f"an update of weights ended after {len(stream.came)} tensors ({error}): "
                                        f"{ALL_NEEDED}") from error
            stream.seconds += time.perf_counter() - start

    def _open_stream(self) -> weight_update.WeightStream:
        self._synchronize()
        try:
            self._restore(WEIGHTS)  # slots are views
            return weight_update.WeightStream(self._updated_weights())
        except BaseException:
            self._free_again(WEIGHTS)
            raise

    def _begin_stream(self, stream: weight_update.WeightStream, keeps_rows: bool) -> None:
        stream.has_begun = True  # from now on a failure leaves the weights incomplete
        self._begin_update(keeps_rows)
        restore_order([self._parts.model, *self._modules()])

    def finish_stream(self, needs_all: bool) -> UpdateReport:
        """End an update whose tensors came one by one. It must have all weights if `needs_all` is True or the weights
        were incomplete before; otherwise any of them will do, and an update without tensors changes nothing."""
        with self._background_paused():
            stream, self._stream, start = self._stream, None, time.perf_counter()
            if stream is None or not stream.has_begun:
                self._free_again(WEIGHTS)
                if needs_all:
                    raise WeightError("the update holds no tensor that the model uses: give it all weights")
                return UpdateReport()
            missing = stream.missing(self._doubtful) if needs_all or self._was_incomplete else ()
            try:
                if missing:
                    raise WeightError(f"the update lacks {some_names(missing)}")
                self._complete(stream.came)
            except BaseException as error:
                self._doubt(stream.came)
                raise WeightsIncomplete(f"an update of weights has ended incomplete ({error}): "
                                        f"{ALL_NEEDED}") from error
            return self._end_update(len(stream.came), start - stream.seconds)

    def checksum(self) -> WeightsChecksum:
        """Compute the checksums of all weights that an update would replace. Refused while weights sleep or are
        incomplete."""
        if WEIGHTS in self._asleep:
            raise ValueError("weights_checksum: the weights are asleep: call wake_up(tags=['weights']) first")
        if self._are_incomplete:
            raise WeightsIncomplete(f"weights_checksum: the weights are incomplete: {ALL_NEEDED}")
        slots = self._updated_weights().with_encoders()
        if self._parts.model.group is not None:
            raise ValueError("weights_checksum: with tensor_parallel_size above 1 each rank holds only a part of each "
                             "tensor: compare the weights of an engine with tensor_parallel_size=1")
        with self._background_paused():
            self._synchronize()
            if all(slot.kind is None for slot in slots.values()):
                return weight_digests.checksum_of(slots)
            self._drop_captures()  # codes are put into the order of their files and back
            restore_order([self._parts.model, *self._modules()])
            try:
                return weight_digests.checksum_of(slots)
            finally:
                self._prepare()
                self._capture_again()

    def _doubt(self, names: Iterable[str]) -> None:
        """Clean up after an update that failed after changing some of these weights: note them, and free weights that
        were asleep."""
        self._doubtful |= set(names)
        self._free_again(WEIGHTS)

    def _begin_update(self, keeps_rows: bool) -> None:
        """Prepare for the first change of a weight: mark the weights as incomplete and drop captured steps. keeps_rows:
        requests keep their rows, including drafts that were accepted with the old weights."""
        if keeps_rows and self.can_run:
            self._step.recurrent.fold_pending()
        self._was_incomplete, self._are_incomplete, self._are_unread = self._are_incomplete, True, False
        self._drop_captures()
        self._release()

    def _complete(self, names: Iterable[str]) -> None:
        """Finish an update that has replaced all weights: recompute everything that is derived from weights."""
        if self._was_incomplete:
            self._read_drafter(names)
        self._prepare()

    def _end_update(self, num_tensors: int, start: float) -> UpdateReport:
        self._are_incomplete, self._are_updated = False, True
        self._doubtful.clear()
        self._asleep.pop(WEIGHTS, None)
        self._release()
        num_captured, seconds = self._capture_again()
        self._parts.background.forget_model()
        report = UpdateReport(num_tensors, time.perf_counter() - start, num_captured, seconds)
        log.info("%d tensors updated in %.2f s, of which %d captured steps took %.2f s", num_tensors, report.seconds,
                 num_captured, seconds)
        return report

    # Weights

    def _updated_weights(self) -> weight_update.UpdatedWeights:
        encoders = self._step.state.params.inputs.encoders.values()
        return weight_update.UpdatedWeights(self._parts.model, self._modules(), encoders)

    def _modules(self) -> list[LayeredModule]:
        """Return the modules of the drafter."""
        return [] if self._parts.drafter is None else self._parts.drafter.modules()

    def _weights_to_free(self, level: int) -> list[FreedMemory]:
        """Return the weights in two groups: those that can be read from files or recomputed, and the others, which are
        always copied to the host before their memory is freed."""
        modules = [self._parts.model, *(self._modules() if self._makes_drafter else [])]
        named = [own for module in modules for own in module.weights().items()]
        slots = [slot.target for name, slot in named if not weight_update.is_buffer(name)]
        buffers = find_storages([slot.target for name, slot in named if weight_update.is_buffer(name)])
        heads = [module for module in self._modules() if isinstance(module, DraftHead)]
        formats = [linear.format for linear in find_modules(modules, Linear)]
        formats += [head.rounded_output.linear.format for head in heads if head.rounded_output is not None]
        own = find_storages(head.own_tensors for head in heads) | buffers
        every = find_storages([self._parts.model, *self._modules(), self._step.state.params.inputs.encoders])
        shared = find_storages([self._parts.model.group])  # other ranks know the addresses
        again = {key: storage for key, storage in find_storages([slots, formats]).items() if key not in own | shared}
        rest = [storage for key, storage in every.items() if key not in again | shared]
        return [FreedMemory(again.values(), keeps=level == 1), FreedMemory(rest, keeps=True)]

    def _drop_packed(self) -> int:
        """Drop the packed second copies of weights, which only a CPU has; `_prepare` makes them again. Returns the
        bytes that this freed."""
        if self._step.state.device.type != "cpu" or not self._packed_bytes:
            return 0
        before, unpacked = self._packed_bytes, replace(self._config, packed_weights=False)
        self._packed_bytes = prepare_all(self._parts.model, self._parts.drafter, unpacked)
        if self._stream is not None:  # its update goes on if the sleep is refused
            restore_order([self._parts.model, *self._modules()])
        collect_replaced()
        return before - self._packed_bytes

    @property
    def _makes_drafter(self) -> bool:
        """Whether the drafter can be made again from its files, as it was at the start."""
        methods = self._config.draft_methods
        return bool(methods) and all(method in (AUTO_METHOD, *METHODS) for method in methods)

    def _restore(self, part: str) -> None:
        for memory in self._asleep.get(part, ()):
            memory.restore()

    def _free_again(self, part: str) -> None:
        """Free a part's memory again after a failure of the work that it was restored for."""
        for memory in self._asleep.get(part, ()):
            memory.free()
        self._release()

    def _read_weights(self) -> None:
        if self._source is None:
            raise ValueError("the weights were dropped and there are no files to read them from: give them by "
                             "update_weights")
        restore_order([self._parts.model, *self._modules()])
        fill_target(self._parts.model, self._config, self._source, None)
        for encoder in self._step.state.params.inputs.encoders.values():
            encoder.drop_updated()
        self._read_drafter(())
        self._prepare()
        if self._are_updated:  # otherwise the files hold the weights that were dropped
            self._parts.background.forget_model()
        self._are_incomplete = self._are_unread = self._are_updated = False
        self._doubtful.clear()

    def _read_drafter(self, given: Iterable[str]) -> None:
        """Fill the dropped weights of the drafter from a new drafter, which is made only for this. Weights named in
        `given`, which the update has replaced, stay as they are."""
        speculative, parts = self._config.speculative, self._parts
        if parts.drafter is None or speculative is None or not self._makes_drafter:
            return
        if not any(module.weights().keys() - set(given) for module in self._modules()):
            return  # an update had them all
        build = replace(draft_build(self._config, parts.model, parts.limits), rounds_output=False)
        fresh = drafters.make_drafter(speculative, build)
        assert fresh is not None
        for module, read in zip(self._modules(), fresh.modules(), strict=True):
            slots, values = module.weights(), read.weights()
            for name in slots.keys() - set(given):
                slots[name].target.copy_(values[name].target)

    def _prepare(self) -> None:
        """Recompute everything that is derived from weights: derived tensors, packed copies, fused layers."""
        for module in (self._parts.model, *self._modules()):
            module.finalize()
        for encoder in self._step.state.params.inputs.encoders.values():
            encoder.finalize()
        before = self._packed_bytes
        self._packed_bytes = prepare_all(self._parts.model, self._parts.drafter, self._config)
        if before or self._packed_bytes:  # a collection takes as long as an update's copies
            collect_replaced()

    # Cache and captured steps

    def _cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the cache: the pages, and the states of recurrent layers. Their content need not be
        kept, because no request has a row."""
        rows = self._step.recurrent.layers.values()
        return [self._step.pool.data, *(tensor for own in rows
                                        for tensor in (own.state, own.tail, own.conv_in, *own.gates))]

    def _synchronize(self) -> None:
        if self._step.state.device.type == "cuda":
            torch.cuda.synchronize()

    def _release(self) -> None:
        """Give memory that torch caches for reuse back to the device, and pinned memory back to the host."""
        if self._step.state.device.type == "cuda":
            torch.cuda.empty_cache()
            release_copies()

    def _drop_captures(self) -> None:
        if not isinstance(self._runner, LocalRunner) and self._runner.graphs is not None:
            self._runner.graphs.drop()
            self._lacks_captures = True

    def _capture_again(self) -> tuple[int, float]:
        """Capture the dropped steps again, if all parts are awake and the weights are whole. Returns the number of
        captured steps and the seconds that it took."""
        if not self._lacks_captures or not self.can_run:
            return 0, 0.0
        assert not isinstance(self._runner, LocalRunner)
        start = time.perf_counter()
        try:
            num_captured = self._runner.capture_again()
            self._synchronize()
        except Exception:  # the weights are in place: an error would say that they are not
            log.exception("graphs dropped for sleep could not be captured again: steps run on the existing graphs")
            return 0, time.perf_counter() - start
        self._lacks_captures = False
        return num_captured, time.perf_counter() - start
