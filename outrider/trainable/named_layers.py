"""Building blocks that the networks in training share: layers that find their weights by name, and rotary
embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F


class NamedLayers:
    """Linear layers, norms and MLPs whose weights come from a dictionary, which an optimizer updates."""

    def __init__(self, weights: Mapping[str, torch.Tensor], eps: float) -> None:
        self._weights, self._eps = weights, eps

    def _mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(f"{prefix}.mlp.{name}_proj", x) for name in ("gate", "up"))
        return self._linear(f"{prefix}.mlp.down_proj", F.silu(gate) * up)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(wide(x), (x.shape[-1],), self._weights[f"{name}.weight"], self._eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply rotary embedding to the halves of x [.., dim] at positions [.., 1]; the other axes are equal or
    broadcast."""
    steps = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=wide(x).dtype) / x.shape[-1]
    angles = positions * theta**-steps
    cos, sin = angles.cos(), angles.sin()
    one, two = wide(x).chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32 at least, because norms, angles and softmax are not computed in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()
