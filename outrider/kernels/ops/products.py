"""Entries of the table of operations: products with a weight [outputs, inputs].

No product has a norm fused before it: every program of the product would read and scale the whole input again, so a
norm is faster as a kernel of its own.
"""

from __future__ import annotations

import torch

from outrider.kernels import float32_products, reference, vendor_products
from outrider.kernels.ops.conditions import has_one_row, is_few_rows_for_native
from outrider.kernels.ops.elements import gated, relu2
from outrider.kernels.ops.operation import (
    BFLOAT16,
    FLOAT32,
    SIXTEEN_BITS,
    Kernel,
    Operation,
    native_kernel,
    triton_kernel,
)

linear = Operation(
    reference.linear,
    triton_kernel("outrider.kernels.gpu.hopper.few_rows:few_rows_linear", BFLOAT16,
                  "outrider.kernels.gpu.hopper.few_rows:is_fastest"),
    triton_kernel("outrider.kernels.gpu.linear.matvec:matvec", BFLOAT16,
                  "outrider.kernels.gpu.linear.matvec:is_fastest"),
    triton_kernel("outrider.kernels.gpu.linear.split:split_linear", BFLOAT16,
                  "outrider.kernels.gpu.linear.split:is_fastest"),
    triton_kernel("outrider.kernels.gpu.linear.thin:thin_linear", BFLOAT16,
                  "outrider.kernels.gpu.linear.thin:is_fastest"),
    Kernel("library", "cuda", float32_products.summed_product, FLOAT32, float32_products.takes_rows),
    exact="outrider.kernels.ops.exact:linear",
)
prepare_linear = Operation(
    reference.prepare_linear,
    Kernel("host", "cpu", "outrider.kernels.cpu.products:make_product"),
    exact="outrider.kernels.ops.exact:prepare_linear",
)
linear_wide = Operation(
    reference.linear_wide,
    native_kernel("outrider.kernels.cpu:linear", FLOAT32, is_few_rows_for_native),
    triton_kernel("outrider.kernels.gpu.linear.matvec:matvec_wide", BFLOAT16,
                  "outrider.kernels.gpu.linear.matvec:is_fastest"),
    triton_kernel("outrider.kernels.gpu.hopper.few_rows:few_rows_wide", BFLOAT16,
                  "outrider.kernels.gpu.hopper.few_rows:is_fastest_wide"),
    Kernel("library", "cuda", vendor_products.wide_product, SIXTEEN_BITS),
    exact="outrider.kernels.ops.exact:linear_wide",
)


def _gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) * up of a product whose weight holds the gate rows, then the up rows."""
    return gated(linear(x, weight), activation)


gated_linear = Operation(
    _gated_linear,
    triton_kernel("outrider.kernels.gpu.linear.matvec:gated_matvec", BFLOAT16, has_one_row),
    triton_kernel("outrider.kernels.gpu.hopper.few_rows:few_rows_gated", BFLOAT16,
                  "outrider.kernels.gpu.hopper.few_rows:is_fastest_gated"),
    triton_kernel("outrider.kernels.gpu.linear.thin:gated_linear", BFLOAT16,
                  "outrider.kernels.gpu.linear.thin:is_fastest_gated"),
    name="gated_linear", exact="outrider.kernels.ops.exact:gated_linear",
)


def _relu2_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the square of relu of a product."""
    return relu2(linear(x, weight))


relu2_linear = Operation(
    _relu2_linear,
    triton_kernel("outrider.kernels.gpu.linear.matvec:relu2_matvec", BFLOAT16, has_one_row),
    name="relu2_linear", exact="outrider.kernels.ops.exact:relu2_linear",
)


def _linear_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                bias: torch.Tensor | None = None) -> None:
    """residual += x @ weight' + bias, in place."""
    residual.add_(linear(x, weight, bias))


linear_add = Operation(
    _linear_add,
    triton_kernel("outrider.kernels.gpu.linear.matvec:add_matvec", BFLOAT16, has_one_row),
    Kernel("library", "cuda", vendor_products.add_product, SIXTEEN_BITS, vendor_products.has_many_rows),
    name="linear_add", exact="outrider.kernels.ops.exact:linear_add",
)
