"""LoRA adapters on the CPU: their products, computed with the matrix products of exact mode."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from outrider.kernels import ops
from outrider.kernels.adapter_products import add_by, add_embeddings_by, add_heads_by, mix_experts_by, reduce_by
from outrider.kernels.delta_tables import DeltaTables, RowSlots, TargetRange
from outrider.kernels.ops import exact

reduce_adapters = partial(reduce_by, exact.linear)
add_adapters = partial(add_by, exact.linear)


def add_adapters_gated(inner: Tensor, out: Tensor, activation: str, rows: RowSlots, tables: DeltaTables,
                       targets: TargetRange) -> Tensor:
    """Add the adapters' results and apply a gated activation; see `kernels.adapter_products.add_adapters_gated` for the
    arguments."""
    ops.add_adapters(inner, out, 0, rows, tables, targets)
    return ops.gated(out, activation)


add_adapter_embeddings = partial(add_embeddings_by, exact.linear)
add_head_adapters = partial(add_heads_by, exact.linear)
mix_adapted_experts = partial(mix_experts_by, exact.linear)
