"""Adapters in C code. `kernels/adapters.py` is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.adapters import AdapterTables, RowSlots, TargetRange
from outrider.kernels.native.build import library
from outrider.kernels.native.checks import is_index, is_matrix


def takes_reduce(x: Tensor, rows: RowSlots, tables: AdapterTables, targets: range) -> bool:
    return is_matrix(x) and len(x) == len(rows.slots) and targets.stop <= len(tables.bounds) and _are_good(rows, tables)


def reduce_adapters(x: Tensor, rows: RowSlots, tables: AdapterTables, targets: range) -> Tensor:
    inner = torch.empty(1, len(x), len(targets), tables.max_rank)
    library().reduce_adapters(
        x.data_ptr(), x.stride(0), tables.numbers.data_ptr(), tables.places.data_ptr(), rows.sorted_slots.data_ptr(),
        rows.order.data_ptr(), inner.data_ptr(), len(x), x.shape[1], targets.start, len(targets), len(tables.bounds),
        tables.max_rank, torch.get_num_threads(),
    )
    return inner


def takes_add(inner: Tensor, out: Tensor, first: int, rows: RowSlots, tables: AdapterTables,
              targets: TargetRange) -> bool:
    count = len(targets.within(first, first + out.shape[1]))
    return (is_matrix(out) and inner.is_contiguous() and inner.shape == (1, len(rows.slots), count, tables.max_rank)
            and len(out) == len(rows.slots) and _are_good(rows, tables))


def add_adapters(inner: Tensor, out: Tensor, first: int, rows: RowSlots, tables: AdapterTables,
                 targets: TargetRange) -> None:
    asked = targets.within(first, first + out.shape[1])
    library().add_adapters(
        inner.data_ptr(), tables.numbers.data_ptr(), tables.places.data_ptr(), tables.scales.data_ptr(),
        tables.bounds.data_ptr(), rows.sorted_slots.data_ptr(), rows.order.data_ptr(), out.data_ptr(), out.stride(0),
        len(out), first, out.shape[1], asked.start, len(asked), len(tables.bounds), tables.max_rank,
        torch.get_num_threads(),
    )


def _are_good(rows: RowSlots, tables: AdapterTables) -> bool:
    indices = rows.sorted_slots, rows.order, tables.places, tables.bounds
    return (tables.numbers.dtype is torch.float32 and is_matrix(tables.scales) and tables.scales.is_contiguous()
            and all(map(is_index, indices)))
