"""The vision towers of Qwen3-VL and Qwen3.5.

All patches of 16 x 16 pixels attend to each other in every block, and 2 x 2 patches are merged to one token. The towers
expect two frames of a video; for a picture both frames are equal. In Qwen3-VL some blocks also give features that the
language model adds to its hidden states (deepstack)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from outrider.kernels.reference import widened
from outrider.layers import Linear, Module, Parameter
from outrider.models.config import ConfigReader
from outrider.models.vision.base import ImageFeatures, VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.levels import centered_levels
from outrider.models.vision.parts import (
    BiasedNorm,
    attend_within_image,
    embed_patches,
    level_table,
    product,
    read_theta,
    rope_frequencies,
    turn_halves,
)

NORM_EPS = 1e-6


class QwenPatchProduct(Module):
    """The linear layer that embeds patches. The weight is stored as a convolution over frames, rows and columns."""

    def __init__(self, hidden_size: int, frames: int, side: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.frames = frames
        self.weight = torch.empty(hidden_size, 3, frames, side, side, dtype=dtype, device=device)
        self.bias = torch.empty(hidden_size, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("weight", Parameter(self.weight)), ("bias", Parameter(self.bias))

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Embed patches, given as the numbers of one frame: [patches, 3 * side * side]."""
        frames = patches.view(len(patches), 3, 1, -1).expand(-1, -1, self.frames, -1)
        return F.linear(frames.flatten(1), self.weight.flatten(1), self.bias)


class QwenTowerAttention(Module):
    def __init__(self, hidden_size: int, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.scale = num_heads, (hidden_size // num_heads) ** -0.5
        self.qkv = Linear(hidden_size, 3 * hidden_size, bias=True, dtype=dtype, device=device)
        self.out = Linear(hidden_size, hidden_size, bias=True, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("qkv", self.qkv), ("proj", self.out)

    def __call__(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = product(self.qkv, x).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        attended = attend_within_image(turn_halves(q, angles), turn_halves(k, angles), v, self.scale)
        return product(self.out, attended.flatten(1))


class QwenTowerMLP(Module):
    """A tower's MLP: linear layer, GELU, linear layer. The GELU is approximate in blocks, and exact where patches are
    merged."""

    def __init__(self, in_size: int, wide: int, out_size: int, *, approximate: str, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.approximate = approximate
        self.up = Linear(in_size, wide, bias=True, dtype=dtype, device=device)
        self.down = Linear(wide, out_size, bias=True, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("linear_fc1", self.up), ("linear_fc2", self.down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(self.down, F.gelu(product(self.up, x), approximate=self.approximate))


class QwenTowerBlock(Module):
    def __init__(self, hidden_size: int, wide: int, num_heads: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.attention_norm, self.mlp_norm = (BiasedNorm(hidden_size, NORM_EPS, dtype=dtype, device=device)
                                              for _ in range(2))
        self.attention = QwenTowerAttention(hidden_size, num_heads, dtype=dtype, device=device)
        self.mlp = QwenTowerMLP(hidden_size, wide, hidden_size, approximate="tanh", dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("norm1", self.attention_norm), ("norm2", self.mlp_norm), ("attn", self.attention),
                ("mlp", self.mlp))

    def __call__(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class QwenPatchMerger(Module):
    """Turns the patches of each token into one embedding. It norms each patch, or all patches of a token together."""

    def __init__(self, hidden_size: int, per_token: int, out_size: int, *, norms_token: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.width, self.norms_token = hidden_size * per_token, norms_token
        norm_size = self.width if norms_token else hidden_size
        self.norm = BiasedNorm(norm_size, NORM_EPS, dtype=dtype, device=device)
        self.mlp = QwenTowerMLP(self.width, self.width, out_size, approximate="none", dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("norm", self.norm), ("", self.mlp)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.norm(x.view(-1, self.width)) if self.norms_token else self.norm(x).view(-1, self.width)
        return self.mlp(joined)


class QwenTower(VisionTower):
    """The tower of Qwen3.5, and of Qwen3-VL without its deepstack."""

    prefixes = ("model.visual.",)

    def __init__(self, config: ConfigReader, vision: ConfigReader, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        size, num_heads = read_widths(vision)
        vision.must_equal("out_hidden_size", self.hidden_size, default=self.hidden_size)
        self.merge = vision.get("spatial_merge_size", int, 2, least=1)
        side = vision.get("patch_size", int, 16, least=1)
        self.patches_per_token, self.patch_bytes = self.merge**2, 3 * side**2
        self.patch = QwenPatchProduct(size, vision.get("temporal_patch_size", int, 2, least=1), side, dtype=dtype,
                                      device=device)
        self.side = read_side(vision)
        self.positions = torch.empty(self.side**2, size, dtype=dtype, device=device)
        self.frequencies = rope_frequencies(size // num_heads // 2, read_theta(vision, 10000.0), dtype, device)
        wide, depth = vision.get("intermediate_size", int, 4304, least=1), vision.get("depth", int, 27, least=1)
        self.blocks = [QwenTowerBlock(size, wide, num_heads, dtype=dtype, device=device) for _ in range(depth)]
        self.taps = self.read_taps(vision, depth)
        first, *others = (QwenPatchMerger(size, self.merge**2, self.hidden_size, norms_token=index > 0, dtype=dtype,
                                          device=device) for index in range(1 + len(self.taps)))
        self.merger, self.deepstack_mergers = first, others
        self.levels = level_table(centered_levels(), dtype, device)

    def read_taps(self, vision: ConfigReader, depth: int) -> list[int]:
        """Read the blocks after which patches are also merged for the deepstack."""
        vision.must_equal("deepstack_visual_indexes", None, [])
        return []

    def parts(self) -> Sequence[tuple[str, Module]]:
        deepstack = ((f"deepstack_merger_list.{index}", part) for index, part in enumerate(self.deepstack_mergers))
        named: list[tuple[str, Module]] = [
            ("patch_embed.proj", self.patch),
            ("pos_embed.weight", Parameter(self.positions)),
            *((f"blocks.{index}", block) for index, block in enumerate(self.blocks)),
            ("merger", self.merger),
            *deepstack,
        ]
        return [(f"model.visual.{name}", part) for name, part in named]

    def shorten(self) -> None:
        self.taps = [*range(len(self.taps))]
        del self.blocks[len(self.taps) + 1 :]  # one more, which runs while the features of all taps are there

    def encode(self, patches: torch.Tensor, grid: ImageGrid) -> ImageFeatures:
        """Return the embeddings of one image. patches: one frame of each, in the order (colour, row, column); the
        patches of a token are adjacent."""
        rows, cols = grid.rows * self.merge, grid.cols * self.merge
        x = embed_patches(patches, self.levels, self.patch)
        x = x + self._by_token(self._positions(rows, cols)).to(x.dtype)
        angles = self._by_token(self._angles(rows, cols))
        deepstack = []
        for index, block in enumerate(self.blocks):
            x = block(x, angles)
            if index in self.taps:
                deepstack.append(self.deepstack_mergers[self.taps.index(index)](x))
        return ImageFeatures(self.merger(x), tuple(deepstack))

    def _by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder x [rows, cols, size] of patches so that the patches of a token are adjacent: [patches, size]."""
        rows, cols, size = x.shape
        split = x.view(rows // self.merge, self.merge, cols // self.merge, self.merge, size)
        return split.transpose(1, 2).reshape(rows * cols, size)

    def _positions(self, rows: int, cols: int) -> torch.Tensor:
        """Return the learned grid of position embeddings, stretched so that its corners are the image's: [rows, cols,
        hidden], at least in float32."""
        grid = widened(self.positions).view(self.side, self.side, -1)
        by_row = stretch(grid, rows)
        return stretch(by_row.transpose(0, 1), cols).transpose(0, 1).contiguous()

    def _angles(self, rows: int, cols: int) -> torch.Tensor:
        """Return the angles of each patch, by its row and then by its column: [rows, cols, head dim / 2]."""
        by_row, by_col = (torch.arange(count, device=self.device).to(self.frequencies.dtype)[:, None]
                          * self.frequencies for count in (rows, cols))
        return torch.cat((by_row[:, None].expand(-1, cols, -1), by_col[None].expand(rows, -1, -1)), dim=-1)


class Qwen3VLTower(QwenTower):
    """The tower of Qwen3-VL, dense and with experts."""

    def read_taps(self, vision: ConfigReader, depth: int) -> list[int]:
        taps = vision.get("deepstack_visual_indexes", list[int], [8, 16, 24])
        if len(set(taps)) < len(taps) or any(not 0 <= tap < depth for tap in taps):
            raise vision.refusal("deepstack_visual_indexes", f"it must name different blocks from 0 to {depth - 1}")
        return taps


def stretch(x: torch.Tensor, count: int) -> torch.Tensor:
    """Interpolate x [side, ..] along its first axis to `count` values, the first and last of which stay."""
    side = len(x)
    places = torch.arange(count, device=x.device).to(x.dtype) * ((side - 1) / max(count - 1, 1))
    before = places.floor().clamp_max(side - 1)
    share = (places - before).view(-1, *[1] * (x.dim() - 1))
    first = before.long()
    return x[first] * (1 - share) + x[(first + 1).clamp_max(side - 1)] * share


def read_widths(vision: ConfigReader) -> tuple[int, int]:
    """Read the hidden size and the number of heads."""
    vision.must_equal("hidden_act", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    vision.must_equal("in_channels", 3, default=3)
    size, num_heads = vision.get("hidden_size", int, 1152, least=1), vision.get("num_heads", int, 16, least=1)
    if size % (num_heads * 4):
        raise vision.refusal("num_heads", f"hidden_size ({size}) must be heads of a size that 4 divides")
    return size, num_heads


def read_side(vision: ConfigReader) -> int:
    """Read the number of rows, which is also that of columns, of the learned grid of positions."""
    count = vision.get("num_position_embeddings", int, 2304, least=1)
    side = round(count**0.5)
    if side**2 != count:
        raise vision.refusal("num_position_embeddings", "it must be a square number")
    return side
