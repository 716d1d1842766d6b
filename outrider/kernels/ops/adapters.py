"""Entries of the table of operations: the products of LoRA adapters."""

from __future__ import annotations

from outrider.kernels import adapter_products
from outrider.kernels.ops.operation import (
    FLOAT32,
    UP_TO_FLOAT32,
    Exactness,
    Kernel,
    Operation,
    native_kernel,
    triton_kernel,
)

sort_slots = Operation(
    adapter_products.sort_slots,
    native_kernel("outrider.kernels.cpu.adapters:sort_slots", takes="outrider.kernels.cpu.adapters:takes_sort"),
    triton_kernel("outrider.kernels.gpu.adapters.slots:sort_slots",
                  takes="outrider.kernels.gpu.adapters.slots:takes_few"),
    exact=Exactness.NO_ARITHMETIC,
)
reduce_adapters = Operation(
    adapter_products.reduce_adapters,
    native_kernel("outrider.kernels.cpu.adapters:reduce_adapters", FLOAT32,
                  "outrider.kernels.cpu.adapters:takes_reduce"),
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:reduce_adapters"),
    triton_kernel("outrider.kernels.gpu.adapters.linear:reduce_adapters", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
add_adapters = Operation(
    adapter_products.add_adapters,
    native_kernel("outrider.kernels.cpu.adapters:add_adapters", FLOAT32,
                  "outrider.kernels.cpu.adapters:takes_add"),
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_adapters"),
    triton_kernel("outrider.kernels.gpu.adapters.linear:add_adapters", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
add_adapters_gated = Operation(
    adapter_products.add_adapters_gated,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_adapters_gated"),
    triton_kernel("outrider.kernels.gpu.adapters.linear:add_adapters_gated", UP_TO_FLOAT32,
                  "outrider.kernels.gpu.adapters.linear:takes_gated"),
    exact=Exactness.ROW_BY_ROW,
)
add_adapter_embeddings = Operation(
    adapter_products.add_adapter_embeddings,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_adapter_embeddings"),
    triton_kernel("outrider.kernels.gpu.adapters.linear:add_adapter_embeddings", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
add_head_adapters = Operation(
    adapter_products.add_head_adapters,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_head_adapters"),
    triton_kernel("outrider.kernels.gpu.adapters.heads:add_head_adapters", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
mix_adapted_experts = Operation(
    adapter_products.mix_adapted_experts,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:mix_adapted_experts"),
    triton_kernel("outrider.kernels.gpu.adapters.experts:mix_adapted_experts", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
