"""Parts that towers share: linear layers, norms, the embedding of patches, and attention over one image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.kernels.reference import widened
from outrider.layers import Linear, Module, Parameter
from outrider.models.config import ConfigReader
from outrider.models.vision.levels import Levels

MOST_SCORES = 1 << 27  # attention scores at a time, where they are kept: 512 MiB in float32
MOST_NUMBERS = 1 << 25  # numbers of patches at a time
# Not cuDNN's attention: it makes a plan for each size of image, which takes longer than the attention itself.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer of a tower. It is not part of a step, so there is no step context."""
    return linear.format.product(x)


class BiasedNorm(Module):
    """A layer norm with a weight and a bias over the last axis."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.eps = eps
        self.weight, self.bias = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("weight", Parameter(self.weight)), ("bias", Parameter(self.bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def unweighted_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x over the last axis, without a weight."""
    return F.rms_norm(widened(x), x.shape[-1:], None, eps).to(x.dtype)


def level_table(levels: Levels, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(levels)).to(device=device, dtype=dtype)


def embed_patches(patches: torch.Tensor, levels: torch.Tensor,
                  embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Turn the bytes of patches into numbers and embed them, some patches at a time. levels: [256]. embed: from
    [patches, numbers] to [patches, hidden]."""
    rows = max(1, MOST_NUMBERS // patches.shape[1])
    return torch.cat([embed(levels[part.int()]) for part in patches.split(rows)])


def attend_within_image(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Let all patches of an image attend to all of them. q, k, v and the result: [patches, heads, head dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    num_heads, num_patches = q.shape[1:3]
    rows = num_patches if _is_fused(q) else max(1, MOST_SCORES // (num_heads * num_patches))
    with sdpa_kernel(ATTENTION):
        out = [F.scaled_dot_product_attention(part, k, v, scale=scale) for part in q.split(rows, dim=2)]
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2))[0].transpose(0, 1)


def _is_fused(q: torch.Tensor) -> bool:
    """Whether a kernel serves that keeps no scores, whatever the size of the image."""
    return q.is_meta or (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16))


def read_theta(vision: ConfigReader, default: float) -> float:
    """Read the base of a tower's rope, which rotates pairs of numbers by the row and the column of a patch."""
    rope = vision.section_or_empty("rope_parameters")
    rope.must_equal("rope_type", "axial", "default", default="axial")
    theta = rope.get("rope_theta", float, default)
    if theta <= 1:
        raise rope.refusal("rope_theta", "it must be greater than 1")
    return theta


def rope_frequencies(size: int, theta: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the frequencies [size / 2] with which `size` numbers of a head rotate along one axis. float32, or float64
    in a float64 tower."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (1.0 / theta ** (torch.arange(0, size, 2, dtype=wide) / size)).to(device)


def turn_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate x [patches, heads, size]: number i and number i + size / 2 are a pair. angles: [patches, size / 2]."""
    wide = widened(x)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
