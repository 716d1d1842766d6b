"""The experts of one or two token rows together with a shared expert, in the same launches."""

from __future__ import annotations

import torch

from outrider.kernels.activations import CLAMPED
from outrider.kernels.gpu.common import FLOATS, refuse, require_tensor, uses_pdl
from outrider.kernels.gpu.experts.moe import activation_code
from outrider.kernels.gpu.experts.rows import MAX_PAIRS, expert_rows, mix_rows


def experts_with_shared(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, shared_gate_up: torch.Tensor, shared_down: torch.Tensor, *, pdl: bool | None = None,
) -> torch.Tensor:
    """Compute a token row's experts and the shared expert in the same launches; see `kernels.moe.experts_with_shared`
    for the arguments. Accepts the calls for which `takes_shared` is true."""
    name, device, pdl = "experts_with_shared", x.device, uses_pdl(x.device) if pdl is None else pdl
    if not takes_shared(x, ids, weights, gate_up, down, activation, shared_gate_up, shared_down):
        refuse(name, "shared_gate_up", f"has shape {list(shared_gate_up.shape)}, expected that of an expert")
    require_tensor(name, "x", x, (ids.shape[0], down.shape[1]), device, FLOATS)
    require_tensor(name, "weights", weights, ids.shape, device, (torch.float32,), inner_contiguous=2)
    made = expert_rows(x, gate_up, ids, down.shape[2], activation_code(activation), pdl, shared_gate_up)
    return mix_rows(made, down, ids, weights, pdl, shared_down)


def takes_shared(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
                 activation: str, shared_gate_up: torch.Tensor, shared_down: torch.Tensor) -> bool:
    """Whether `experts_with_shared` has a kernel for this call: there are few token rows, and the shared expert's
    weights are laid out like another expert's."""
    return 0 < ids.numel() <= MAX_PAIRS and activation != CLAMPED and all(
        shared.shape == own.shape[1:] and shared.stride() == own.stride()[1:] and own.stride(2) == 1
        for shared, own in ((shared_gate_up, gate_up), (shared_down, down)))
