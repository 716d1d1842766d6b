"""The operations at the ends of a step, each with its kernels: prepare the batch, count tokens for penalties, share and
commit drafts."""

from __future__ import annotations

from outrider.kernels import reference, step
from outrider.kernels.cpu import checks
from outrider.kernels.ops.operation import Exactness, Operation, native_kernel, triton_kernel

count_runs = Operation(
    reference.count_runs,
    native_kernel("outrider.kernels.cpu:count_runs", takes=checks.takes_count_runs),
    triton_kernel("outrider.kernels.gpu.sampling.token_counts:count_runs"),
    exact=Exactness.NO_ARITHMETIC,
)
prepare_step = Operation(
    step.prepare_step,
    native_kernel("outrider.kernels.cpu.step:prepare_step", takes="outrider.kernels.cpu.step:takes_prepare_step"),
    triton_kernel("outrider.kernels.gpu.step:prepare_step"),
    subject=lambda packet, *_, **__: packet.rows, exact=Exactness.NO_ARITHMETIC,
)
share_drafts = Operation(
    step.share_drafts, triton_kernel("outrider.kernels.gpu.drafts.share:share_drafts"),
    subject=lambda packet, *_, **__: packet.rows, exact=Exactness.NO_ARITHMETIC,
)
commit_step = Operation(
    step.commit_step,
    native_kernel("outrider.kernels.cpu.step:commit_step", takes="outrider.kernels.cpu.step:takes_commit_step"),
    triton_kernel("outrider.kernels.gpu.step:commit_step"),
    exact=Exactness.NO_ARITHMETIC,
)
store_drafts = Operation(
    step.store_drafts,
    native_kernel("outrider.kernels.cpu.step:store_drafts", takes="outrider.kernels.cpu.step:takes_store_drafts"),
    triton_kernel("outrider.kernels.gpu.drafts.entry:store_drafts"),
    exact=Exactness.NO_ARITHMETIC,
)
