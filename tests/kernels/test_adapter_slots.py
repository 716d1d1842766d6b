"""The kernel that sorts token rows by the slots of their adapters against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import ops
from outrider.kernels.delta_tables import NO_SLOT, RowSlots
from outrider.kernels.gpu.adapters import slots as adapter_slots


@pytest.mark.parametrize("count", [1, 2, 31, 64, 65, 512])
@pytest.mark.parametrize("num_slots", [0, 1, 3, 64])
def test_rows_are_sorted_as_torch_sorts_them(device: torch.device, count: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(count + num_slots)
    slots = torch.randint(NO_SLOT, num_slots, (count,), generator=generator).to(device)
    with ops.using("triton", ops.sort_slots):
        found = ops.sort_slots(slots)
    for name, own, wanted in zip(RowSlots._fields, found, RowSlots.from_slots(slots), strict=True):
        assert own.equal(wanted), name


def test_refuses_more_rows_than_it_compares(device: torch.device) -> None:
    for count in (0, 513):
        slots = torch.zeros(count, dtype=torch.int64, device=device)
        assert not adapter_slots.takes_few(slots)
        with pytest.raises(ValueError, match=f"has {count} rows"):
            adapter_slots.sort_slots(slots)
