"""Updates the token counts of rows with penalties by the tokens that a step accepted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.sampling_keys import CountTable


@triton.jit
def find_counts(address):
    """Return the pointer to the counts, from the address that is stored at present. The counts must be allocated by
    then."""
    return tl.multiple_of(tl.multiple_of(tl.load(address), 16).to(tl.pointer_type(tl.int32)), 16)


@kernel(do_not_specialize_on_alignment=["row", "run", "run_len"])
def _count_kernel(address, row, run, run_len, vocab, run_stride, RUN: tl.constexpr, PDL: tl.constexpr):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    counts = find_counts(address)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, RUN)
    is_in = (index < tl.load(run_len + request)) & (tl.load(address) != 0)
    token = tl.load(run + request * run_stride + index, mask=is_in, other=0)
    cell = tl.load(row + request) * vocab + token
    tl.atomic_add(counts + cell, 1, mask=is_in, sem="relaxed")  # a run may hold a token twice


def count_runs(
    row: torch.Tensor, run: torch.Tensor, run_len: torch.Tensor, counts: CountTable, *, pdl: bool | None = None
) -> None:
    name, device, requests = "count_runs", row.device, row.shape[0]
    require_tensor(name, "address", counts.address, (1,), device, (torch.int64,))
    require_tensor(name, "run", run, (requests, None), device, (torch.int64,))
    for argument, tensor in (("row", row), ("run_len", run_len)):
        require_tensor(name, argument, tensor, (requests,), device, (torch.int64,))
    if requests:
        pdl = uses_pdl(device) if pdl is None else pdl
        _count_kernel[(requests,)](
            counts.address, row, run, run_len, counts.width, run.stride(0), RUN=next_power_of_two(run.shape[1]),
            PDL=pdl, num_warps=1, **pdl_options(pdl),
        )
