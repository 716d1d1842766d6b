"""Entries of the table of operations: paged attention on the CPU. On a GPU a backend plans its launches
(mixers/paged)."""

from __future__ import annotations

from outrider.kernels import reference
from outrider.kernels.cpu import checks
from outrider.kernels.ops.operation import FLOAT32, Exactness, Operation, native_kernel

rope_write = Operation(
    reference.rope_write,
    native_kernel("outrider.kernels.cpu:rope_write", FLOAT32, checks.takes_rope_write),
    exact=Exactness.ROW_BY_ROW,
)
paged_attention = Operation(
    reference.paged_attention,
    native_kernel("outrider.kernels.cpu:paged_attention", FLOAT32, checks.takes_paged_attention),
    exact=Exactness.ROW_BY_ROW,
)
