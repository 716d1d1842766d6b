"""Entries of the table of operations: products with weights of codes and scales."""

from __future__ import annotations

from outrider.kernels import moe, scaled
from outrider.kernels.ops.operation import BFLOAT16, Exactness, Kernel, NotExact, Operation, fp8_kernel

arrange_codes = Operation(
    scaled.arrange,
    fp8_kernel("outrider.kernels.gpu.hopper.coded.rows:arrange",
               takes="outrider.kernels.gpu.hopper.coded.rows:has_order"),
    name="arrange_codes", subject=lambda weight, dtype: weight.codes, exact="outrider.kernels.ops.exact:arrange_codes",
)
scaled_linear = Operation(
    scaled.scaled_linear,
    fp8_kernel("outrider.kernels.gpu.hopper.coded.tiles:scaled_linear", BFLOAT16,
               "outrider.kernels.gpu.hopper.coded.tiles:takes"),
    fp8_kernel("outrider.kernels.gpu.linear.scaled:scaled_linear", BFLOAT16),
    exact="outrider.kernels.ops.exact:scaled_linear",
)
scaled_wide = Operation(
    scaled.scaled_wide,
    fp8_kernel("outrider.kernels.gpu.hopper.coded.tiles:scaled_wide", BFLOAT16,
               "outrider.kernels.gpu.hopper.coded.tiles:takes_wide"),
    fp8_kernel("outrider.kernels.gpu.linear.scaled:scaled_wide", BFLOAT16),
    exact="outrider.kernels.ops.exact:scaled_wide",
)
scaled_gated = Operation(
    scaled.scaled_gated,
    fp8_kernel("outrider.kernels.gpu.hopper.coded.tiles:scaled_gated", BFLOAT16,
               "outrider.kernels.gpu.hopper.coded.tiles:takes"),
    fp8_kernel("outrider.kernels.gpu.linear.scaled:scaled_gated", BFLOAT16,
               "outrider.kernels.gpu.linear.scaled:takes_gate"),
    exact=NotExact("in exact mode the product and its activation are two operations"),
)
scaled_rows = Operation(
    scaled.scaled_rows, fp8_kernel("outrider.kernels.gpu.linear.scaled_codes:scaled_rows"),
    subject=lambda weight, index, dtype: weight.codes, exact=Exactness.NO_ARITHMETIC,
)
scaled_experts = Operation(
    moe.scaled_experts,
    Kernel("host", "cpu", "outrider.kernels.experts_on_host:scaled_experts"),
    fp8_kernel("outrider.kernels.gpu.experts.scaled:scaled_experts", BFLOAT16),
    exact="outrider.kernels.ops.exact:scaled_experts",
)
