"""LoRA adapters on a mixture of experts: the experts' two projections are computed for every pair of a token row and an
expert, and each adapter's low-rank product is added to its pairs.

Nothing is read on the host. All pairs are computed, but only the token rows whose adapter changes the experts get a new
result.
"""

from __future__ import annotations

import torch

from outrider.kernels.activations import silu_limit
from outrider.kernels.adapter_products import ExpertTargets
from outrider.kernels.delta_tables import DeltaTables, RowSlots
from outrider.kernels.gpu.adapters.linear import add_to_pairs
from outrider.kernels.gpu.common import FLOATS, refuse, require_tensor, uses_pdl
from outrider.kernels.gpu.elements.activation import gelu_tanh_mul, limited_silu_mul, relu2, silu_mul
from outrider.kernels.gpu.experts.moe import combine, product_of_pairs
from outrider.kernels.gpu.experts.pairs import FEW_PAIRS, sort_pairs

_ACTIVATIONS = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul, "relu2": relu2}


def mix_adapted_experts(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
                        gate_up: torch.Tensor, down: torch.Tensor, activation: str, added: torch.Tensor | None,
                        rows: RowSlots, tables: DeltaTables, targets: ExpertTargets, *,
                        pdl: bool | None = None) -> None:
    """Compute again the rows of `out` whose adapter changes the experts; see
    `kernels.adapter_products.mix_adapted_experts` for the arguments."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name, device, (num_experts, hidden, width) = "mix_adapted_experts", x.device, down.shape
    limit = silu_limit(activation)
    if activation not in _ACTIVATIONS and limit is None:
        refuse(name, "activation", f"is {activation!r}, known are {list(_ACTIVATIONS)}")
    num_outputs = width if activation == "relu2" else 2 * width
    require_tensor(name, "x", x, (len(out), hidden), device, FLOATS)
    require_tensor(name, "out", out, (len(x), hidden), device, (x.dtype,))
    require_tensor(name, "gate_up", gate_up, (num_experts, num_outputs, hidden), device, (x.dtype,))
    require_tensor(name, "down", down, (num_experts, hidden, width), device, (x.dtype,))
    require_tensor(name, "ids", ids, (len(x), None), device, (torch.int64,), inner_contiguous=2)
    require_tensor(name, "weights", weights, tuple(ids.shape), device, (torch.float32,), inner_contiguous=2)
    require_tensor(name, "slots", rows.slots, (len(x),), device, (torch.int64,))
    if not ids.numel():
        return
    slot = rows.slots[:, None]
    of_pairs = RowSlots.from_slots(torch.where(slot >= 0, slot * num_experts + ids, slot).flatten())
    pairs = None if ids.numel() <= FEW_PAIRS else sort_pairs(ids, num_experts, pdl=pdl)
    projected = product_of_pairs(x, gate_up, ids, pairs, ids.shape[1], num_outputs, pdl)
    max_rank = num_outputs // width * tables.max_rank  # gate and up may have been adapted apart
    add_to_pairs(x, projected, of_pairs, tables, targets.first, max_rank, num_experts, pdl)
    inner = _ACTIVATIONS[activation](projected) if limit is None else limited_silu_mul(projected, limit)
    made = product_of_pairs(inner, down, ids, pairs, 1, hidden, pdl)
    add_to_pairs(inner, made, of_pairs, tables, targets.down, tables.max_rank, num_experts, pdl)
    mixed = combine(made, weights, added=added, pdl=pdl)
    ranks = tables.places[rows.slots.clamp(min=0)][:, :, 2]
    is_changed = (rows.slots >= 0) & ((ranks[:, targets.first] > 0) | (ranks[:, targets.down] > 0))
    out.copy_(torch.where(is_changed[:, None], mixed, out))
