"""LoRA adapters computed by C code. `kernels/adapter_products.py` is the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.checks import is_index, is_matrix
from outrider.kernels.cpu.structures import ADAPTERS, LAYER_TARGETS, TARGETS
from outrider.kernels.delta_tables import SEGMENT_ROWS, DeltaTables, RowSlots, TargetRange


class LayerDeltas:
    """The adapters of a step's token rows, for several decoder layers that one native call computes. Keeps the tensors
    alive. Made by `build`."""

    def __init__(self, rows: RowSlots, tables: DeltaTables, targets: bytes) -> None:
        self.num_rows, self.targets, self._owners = len(rows.slots), targets, (rows, tables)
        self.packed = _packed(rows, tables)

    @classmethod
    def build(cls, rows: RowSlots, tables: DeltaTables, targets: bytes) -> LayerDeltas | None:
        """Check and pack the adapters of a step. targets: the results of `pack_layer_targets` for all layers,
        concatenated. Returns None if the C code does not take these tensors."""
        return cls(rows, tables, targets) if _are_good(rows, tables) else None


def pack_layer_targets(products: Sequence[TargetRange | None]) -> bytes:
    """Pack the adapter targets of a layer's products, in the order of `LayerWeights`. None is a product that adapters
    do not change."""
    qkv, out, gate_up, down = (
        TARGETS.pack(first=0, count=0) if own is None else TARGETS.pack(first=own.first, count=len(own.ends))
        for own in products
    )
    return LAYER_TARGETS.pack(qkv=qkv, out=out, gate_up=gate_up, down=down)


def takes_sort(slots: Tensor) -> bool:
    return is_index(slots) and slots.dim() == 1


def sort_slots(slots: Tensor) -> RowSlots:
    rows = len(slots)
    numbers = torch.empty(5 * rows + 1, dtype=torch.int64)
    sorted_slots, order, segments, num_segments = numbers.split([rows, rows, 3 * rows, 1])
    library().sort_slots(slots.data_ptr(), rows, SEGMENT_ROWS, sorted_slots.data_ptr(), order.data_ptr(),
                         segments.data_ptr(), num_segments.data_ptr())
    return RowSlots(slots, sorted_slots, order, segments.view(rows, 3), num_segments)


def takes_reduce(x: Tensor, rows: RowSlots, tables: DeltaTables, targets: range) -> bool:
    return is_matrix(x) and len(x) == len(rows.slots) and targets.stop <= len(tables.bounds) and _are_good(rows, tables)


def reduce_adapters(x: Tensor, rows: RowSlots, tables: DeltaTables, targets: range) -> Tensor:
    inner = torch.empty(1, len(x), len(targets), tables.max_rank)
    library().reduce_adapters(
        _packed(rows, tables), TARGETS.pack(first=targets.start, count=len(targets)), x.data_ptr(), x.stride(0),
        x.shape[1], inner.data_ptr(), torch.get_num_threads(),
    )
    return inner


def takes_add(inner: Tensor, out: Tensor, first: int, rows: RowSlots, tables: DeltaTables,
              targets: TargetRange) -> bool:
    count = len(targets.within(first, first + out.shape[1]))
    return (is_matrix(out) and inner.is_contiguous() and inner.shape == (1, len(rows.slots), count, tables.max_rank)
            and len(out) == len(rows.slots) and _are_good(rows, tables))


def add_adapters(inner: Tensor, out: Tensor, first: int, rows: RowSlots, tables: DeltaTables,
                 targets: TargetRange) -> None:
    asked = targets.within(first, first + out.shape[1])
    library().add_adapters(
        _packed(rows, tables), TARGETS.pack(first=asked.start, count=len(asked)), inner.data_ptr(), out.data_ptr(),
        out.stride(0), first, out.shape[1], torch.get_num_threads(),
    )


def _are_good(rows: RowSlots, tables: DeltaTables) -> bool:
    indices = rows.order, rows.segments, tables.places, tables.bounds
    return (tables.numbers.dtype is torch.float32 and is_matrix(tables.scales) and tables.scales.is_contiguous()
            and all(map(is_index, indices)))


def _packed(rows: RowSlots, tables: DeltaTables) -> bytes:
    return ADAPTERS.pack(
        numbers=tables.numbers.data_ptr(), places=tables.places.data_ptr(), scales=tables.scales.data_ptr(),
        bounds=tables.bounds.data_ptr(), order=rows.order.data_ptr(), segments=rows.segments.data_ptr(),
        rows=len(rows.slots), num_targets=len(tables.bounds), max_rank=tables.max_rank,
    )
