"""Entries of the table of operations: mixtures of experts."""

from __future__ import annotations

from outrider.kernels import moe
from outrider.kernels.ops.operation import BFLOAT16, UP_TO_FLOAT32, Kernel, NotExact, Operation, triton_kernel

route = Operation(
    moe.route,
    triton_kernel("outrider.kernels.gpu.experts.router:route", UP_TO_FLOAT32,
                  "outrider.kernels.gpu.experts.router:takes_rule"),
    exact="outrider.kernels.ops.exact:route",
)
experts = Operation(
    moe.experts,
    Kernel("host", "cpu", "outrider.kernels.experts_on_host:experts"),
    triton_kernel("outrider.kernels.gpu.experts.moe:experts", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:experts",
)
experts_with_shared = Operation(
    moe.experts_with_shared,
    triton_kernel("outrider.kernels.gpu.experts.shared:experts_with_shared", BFLOAT16,
                  "outrider.kernels.gpu.experts.shared:takes_shared"),
    exact=NotExact("it serves one or two token rows, and more of them are computed one product after the other"),
)
