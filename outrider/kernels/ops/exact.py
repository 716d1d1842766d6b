"""Operations that replace others in exact mode: a token row has the same bits alone and among any others.

Where no kernel serves a call, the reference computes it token row by token row. That is slow, and exact on every device
whose library gives the same result for the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from outrider.kernels import activations, exact_latent, moe, pooled_keys, reference, scaled, streams, token_blocks
from outrider.kernels.cpu import checks
from outrider.kernels.latent import TokenContexts
from outrider.kernels.ops.operation import (
    BFLOAT16,
    FLOAT32,
    SIXTEEN_BITS,
    UP_TO_FLOAT32,
    Exactness,
    Kernel,
    Operation,
    fp8_kernel,
    native_kernel,
    triton_kernel,
)
from outrider.kernels.pooled_keys import PoolCells, PoolWeights
from outrider.kernels.token_blocks import TokenBlocks

P = ParamSpec("P")
R = TypeVar("R")
ROW_BY_ROW = Exactness.ROW_BY_ROW


def row_by_row(computed: Callable[P, R], *per_row: int) -> Callable[P, R]:
    """Return a function that calls `computed` for one token row at a time and joins the results. per_row: indices of
    the arguments, beside the first, that may have token rows too. Rows are copied, because a library may compute
    differently depending on where a row is in memory."""

    @wraps(computed)
    def one_by_one(*args: P.args, **options: P.kwargs) -> R:
        places = [at for at in (0, *per_row) if at < len(args) and args[at] is not None]
        given: list[Any] = list(args)
        split = [given[at].split(1) for at in places]
        rows = []
        for row in zip(*split, strict=True):
            for at, value in zip(places, row, strict=True):
                given[at] = value.clone()
            rows.append(computed(*given, **options))
        return _joined(rows) if rows else computed(*args, **options)

    return one_by_one


def _joined(rows: list[Any]) -> Any:
    """Join the results of all token rows: tensors, or (named) tuples of tensors."""
    if isinstance(rows[0], torch.Tensor):
        return torch.cat(rows)
    joined = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return tuple(joined) if type(rows[0]) is tuple else type(rows[0])(*joined)


gated_norm = Operation(
    row_by_row(reference.gated_norm, 1),
    triton_kernel("outrider.kernels.gpu.elements.gated_norm:gated_norm", UP_TO_FLOAT32),
    name="exact_gated_norm", exact=ROW_BY_ROW,
)

# Products with a weight [outputs, inputs]

linear = Operation(
    row_by_row(reference.linear),
    native_kernel("outrider.kernels.cpu:linear", FLOAT32, checks.takes_linear),
    triton_kernel("outrider.kernels.gpu.linear.exact_linear:exact_linear", SIXTEEN_BITS),
    name="exact_linear", exact=ROW_BY_ROW,
)
prepare_linear = Operation(
    reference.prepare_linear,
    Kernel("host", "cpu", "outrider.kernels.cpu.products:make_exact_product"),
    name="exact_prepare_linear", exact=ROW_BY_ROW,
)
linear_wide = Operation(
    row_by_row(reference.linear_wide),
    native_kernel("outrider.kernels.cpu:linear", FLOAT32, checks.takes_linear),
    triton_kernel("outrider.kernels.gpu.linear.exact_linear:exact_linear_wide", SIXTEEN_BITS),
    name="exact_linear_wide", exact=ROW_BY_ROW,
)


def _gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    return activations.activate(reference.linear(x, weight), activation)


gated_linear = Operation(
    row_by_row(_gated_linear),
    triton_kernel("outrider.kernels.gpu.linear.exact_linear:exact_gated_linear", SIXTEEN_BITS),
    name="exact_gated_linear", exact=ROW_BY_ROW,
)


def _relu2_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.relu2(linear(x, weight))


relu2_linear = Operation(
    _relu2_linear,
    triton_kernel("outrider.kernels.gpu.linear.exact_linear:exact_relu2_linear", SIXTEEN_BITS),
    name="exact_relu2_linear", exact=ROW_BY_ROW,
)


def _linear_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                bias: torch.Tensor | None = None) -> None:
    residual.add_(linear(x, weight, bias))


linear_add = Operation(_linear_add, name="exact_linear_add", exact=ROW_BY_ROW)

# Products with a weight of codes and scales

arrange_codes = Operation(scaled.arrange, name="exact_arrange_codes", subject=lambda weight, dtype: weight.codes,
                          exact=Exactness.NO_ARITHMETIC)
scaled_linear = Operation(
    row_by_row(scaled.scaled_linear),
    fp8_kernel("outrider.kernels.gpu.linear.scaled:exact_scaled_linear", BFLOAT16),
    name="exact_scaled_linear", exact=ROW_BY_ROW,
)
scaled_wide = Operation(
    row_by_row(scaled.scaled_wide),
    fp8_kernel("outrider.kernels.gpu.linear.scaled:exact_scaled_wide", BFLOAT16),
    name="exact_scaled_wide", exact=ROW_BY_ROW,
)

# Experts

route = Operation(
    row_by_row(moe.route),
    triton_kernel("outrider.kernels.gpu.experts.router:route", UP_TO_FLOAT32,
                  "outrider.kernels.gpu.experts.router:takes_rule"),
    name="exact_route", exact=ROW_BY_ROW,
)
experts = Operation(
    row_by_row(moe.experts, 1, 2, 6),
    Kernel("host", "cpu", "outrider.kernels.experts_on_host:exact_experts"),
    triton_kernel("outrider.kernels.gpu.experts.moe:exact_experts", SIXTEEN_BITS),
    name="exact_experts", exact=ROW_BY_ROW,
)
scaled_experts = Operation(
    row_by_row(moe.scaled_experts, 1, 2, 6),
    Kernel("host", "cpu", "outrider.kernels.experts_on_host:exact_scaled_experts"),
    fp8_kernel("outrider.kernels.gpu.experts.scaled:exact_scaled_experts", BFLOAT16),
    name="exact_scaled_experts", exact=ROW_BY_ROW,
)

# Latent attention and its indexer

write_latents = Operation(
    exact_latent.write_latents,
    triton_kernel("outrider.kernels.gpu.latent.inputs:write_latents", UP_TO_FLOAT32),
    name="exact_write_latents", exact=ROW_BY_ROW,
)
head_products = Operation(
    exact_latent.head_products,
    triton_kernel("outrider.kernels.gpu.latent.head_products:exact_head_products", UP_TO_FLOAT32),
    name="exact_head_products", exact=ROW_BY_ROW,
)
choose_positions = Operation(
    exact_latent.choose_positions,
    triton_kernel("outrider.kernels.gpu.latent.exact_latent:exact_choose_positions", UP_TO_FLOAT32),
    name="exact_choose_positions", exact=ROW_BY_ROW,
)
latent_attention = Operation(
    exact_latent.latent_attention,
    triton_kernel("outrider.kernels.gpu.latent.exact_latent:exact_latent_attention", UP_TO_FLOAT32),
    name="exact_latent_attention", exact=ROW_BY_ROW,
)
dense_latent_attention = Operation(
    exact_latent.dense_latent_attention,
    triton_kernel("outrider.kernels.gpu.latent.exact_latent:exact_dense_latent_attention", UP_TO_FLOAT32),
    name="exact_dense_latent_attention", exact=ROW_BY_ROW,
)

# Attention to chosen blocks


def _write_pooled_keys(packed: torch.Tensor, weights: PoolWeights, cells: PoolCells, contexts: TokenContexts,
                       blocks: TokenBlocks) -> torch.Tensor:
    """Write the token rows one after another, because a block's last token reads from the cache the values that earlier
    rows wrote."""
    if not len(packed):
        return pooled_keys.write_pooled_keys(packed, weights, cells, contexts, blocks)
    made = []
    for at, row in enumerate(packed.split(1)):
        own = slice(at, at + 1)
        one = cells._replace(slots=cells.slots[own], positions=cells.positions[own], offsets=cells.offsets[own])
        made.append(pooled_keys.write_pooled_keys(row.clone(), weights, one, contexts.cut(own), blocks))
    return torch.cat(made)


write_pooled_keys = Operation(
    _write_pooled_keys,
    triton_kernel("outrider.kernels.gpu.index.pooled_keys:write_pooled_keys", UP_TO_FLOAT32),
    name="exact_write_pooled_keys", exact=ROW_BY_ROW,
)
block_attention = Operation(
    token_blocks.exact_block_attention,
    triton_kernel("outrider.kernels.gpu.index.token_blocks:exact_block_attention", UP_TO_FLOAT32),
    name="exact_block_attention", exact=ROW_BY_ROW,
)

# Residual streams. On a CPU a library's exp may differ by the element's place in the tensor.

stream_gates = Operation(
    row_by_row(streams.stream_gates),
    triton_kernel("outrider.kernels.gpu.elements.streams:stream_gates", UP_TO_FLOAT32),
    name="exact_stream_gates", exact=ROW_BY_ROW,
)
mix_streams = Operation(
    row_by_row(streams.mix_streams, 1),
    triton_kernel("outrider.kernels.gpu.elements.streams:mix_streams", UP_TO_FLOAT32),
    name="exact_mix_streams", exact=ROW_BY_ROW,
)
gate_values = Operation(row_by_row(streams.gate_values, 1, 2), name="exact_gate_values", exact=ROW_BY_ROW)
add_silu = Operation(row_by_row(streams.add_silu, 1), name="exact_add_silu", exact=ROW_BY_ROW)
read_streams = Operation(
    row_by_row(streams.read_streams, 1),
    triton_kernel("outrider.kernels.gpu.elements.hyper_streams:read_streams", UP_TO_FLOAT32),
    name="exact_read_streams", exact=ROW_BY_ROW,
)
