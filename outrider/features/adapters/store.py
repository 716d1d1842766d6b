"""AdapterStore: the adapters of a worker. It reads them in threads beside the steps, keeps them in the host's memory by
load number, and copies them to the device when the scheduler says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from outrider.core import Admission, Limits, ScheduledBatch
from outrider.core.step_messages import DeltaReach
from outrider.features.adapters.arena import AdapterArena
from outrider.features.adapters.commands import AdapterRead
from outrider.features.adapters.host_adapter import HostAdapter, read_adapter
from outrider.features.adapters.peft_folder import AdapterError
from outrider.features.adapters.placements import AdapterPlacements
from outrider.features.adapters.step_adapters import StepAdapters
from outrider.features.adapters.targets import Targets
from outrider.kernels import ops
from outrider.kernels.buffers import to_device
from outrider.kernels.delta_tables import NO_SLOT
from outrider.layers.context import DeltaSource
from outrider.lora_request import LoadedAdapter
from outrider.models.base import Model

log = logging.getLogger("outrider")
OPERATIONS: tuple[ops.Operation[..., Any], ...] = (
    ops.reduce_adapters, ops.add_adapters, ops.add_adapter_embeddings, ops.add_head_adapters, ops.mix_adapted_experts,
)


class AdapterStore(DeltaSource):
    def __init__(self, model: Model, max_rank: int, limits: Limits) -> None:
        self.targets = Targets.from_model(model)
        self.arena = AdapterArena(self.targets, limits, max_rank, model.dtype, model.device)
        self._max_rank, self._dtype, self._device = max_rank, model.dtype, model.device
        self._loads: dict[int, Future[HostAdapter]] = {}
        self._slots: dict[int, int] = {}  # by the number of the load
        self._served: set[int] = set()  # rows whose request has an adapter
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-adapters")

    # Commands

    def read(self, number: int, name: str, folder: str) -> None:
        """Begin to read an adapter, in a separate thread."""
        self._loads[number] = self._reader.submit(
            read_adapter, name, folder, self.targets, max_rank=self._max_rank, max_size=self.arena.num_numbers,
            dtype=self._dtype, pin=self._device.type == "cuda")

    def poll(self, number: int) -> AdapterRead | None:
        """Return how the reading of an adapter ended, or None while it is still being read."""
        load = self._loads.get(number)
        if load is None:
            return AdapterRead(error="the adapter was dropped before it had been read")
        if not load.done():
            return None
        try:
            held = load.result()
            return AdapterRead(held.size, digest=held.digest)
        except AdapterError as error:
            return AdapterRead(error=str(error))
        except Exception as error:  # no memory, say: nothing but this adapter suffers from it
            log.exception("an adapter could not be read")
            return AdapterRead(error=f"the adapter could not be read: {type(error).__name__}: {error}")

    def drop(self, number: int) -> None:
        """Drop an adapter that no request uses any more."""
        load = self._loads.pop(number, None)
        if load is not None:
            load.cancel()
        self._slots.pop(number, None)

    @property
    def num_loaded(self) -> int:
        return len(self._loads)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    # Steps

    def begin(self, batch: ScheduledBatch) -> None:
        """Copy adapters to the places that the scheduler chose, before rows are admitted with them."""
        ordered = batch.part(AdapterPlacements)
        for placed in () if ordered is None else ordered.placements:
            self._slots = {number: slot for number, slot in self._slots.items() if slot != placed.slot}
            self.arena.place(self._loads[placed.number].result(), placed.slot, placed.offset)
            self._slots[placed.number] = placed.slot

    def admit(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        parts = {admission.row: admission.request.part(LoadedAdapter) for admission in admissions}
        numbers = {row: None if part is None else part.number for row, part in parts.items()}
        self._served = {row for row in self._served if row not in numbers}
        self._served |= {row for row, number in numbers.items() if number is not None}
        slots = [NO_SLOT if number is None else self._slots[number] for number in numbers.values()]
        rows, own = to_device([*numbers, *slots], torch.int64, self._device).view(2, -1)
        self.arena.slot_of_row.index_copy_(0, rows, own)

    def reset(self) -> None:
        self._slots.clear()
        self._served.clear()
        self.arena.reset()

    def serves(self, rows: Sequence[int]) -> bool:
        return not self._served.isdisjoint(rows)

    @property
    def reach(self) -> DeltaReach:
        return self.arena.reach

    @property
    def possible_reach(self) -> DeltaReach:
        return self.targets.reach

    @property
    def is_capturable(self) -> bool:
        """Whether steps with adapters can be captured in a CUDA graph. They can if kernels compute the adapters'
        products; the torch operations used otherwise read device data on the host."""
        return all(operation.serves(self.arena.tables.numbers) for operation in OPERATIONS)

    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> StepAdapters:
        return StepAdapters(self.arena, self.arena.slot_of_row[rows][request_of], self.reach)
