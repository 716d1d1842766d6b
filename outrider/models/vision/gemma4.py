"""The vision tower of Gemma 4 E2B, E4B, 26B-A4B and 31B.

All patches of 16 x 16 pixels attend to each other in every layer. At the end 3 x 3 patches are averaged to one token.
In E2B and E4B the inputs and outputs of every linear layer are clipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.formats import StoredWeight
from outrider.kernels.reference import widened
from outrider.layers import Linear, Module, Parameter, RMSNorm
from outrider.models.config import ConfigReader
from outrider.models.vision.base import ImageFeatures, Tensors, VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.levels import doubled_levels
from outrider.models.vision.parts import (
    attend_within_image,
    embed_patches,
    level_table,
    product,
    read_theta,
    rope_frequencies,
    turn_halves,
    unweighted_norm,
)

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
SCALE = 1.0  # of attention scores; q and k are normed


@dataclass(frozen=True)
class TowerSizes:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    eps: float
    is_clipped: bool

    @classmethod
    def read(cls, vision: ConfigReader) -> TowerSizes:
        vision.must_equal("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
        vision.must_equal("attention_bias", False, default=False)
        num_heads = vision.get("num_attention_heads", int, 12, least=1)
        vision.must_equal("num_key_value_heads", num_heads, default=num_heads)
        head_dim = vision.get("head_dim", int, 64, least=1)
        if head_dim % 4:
            raise vision.refusal("head_dim", "it must be divisible by 4, for rows and columns of pairs")
        return cls(vision.get("hidden_size", int, 768, least=1), vision.get("intermediate_size", int, 3072, least=1),
                   num_heads, head_dim, vision.get("rms_norm_eps", float, 1e-6, least=0, most=1),
                   vision.get("use_clipped_linears", bool, False))


class ClippedLinear(Module):
    """A linear layer whose input and output are limited to the ranges of their training, if the checkpoint has such
    limits."""

    def __init__(self, in_features: int, out_features: int, *, is_clipped: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.linear = Linear(in_features, out_features, bias=False, dtype=dtype, device=device)
        self.bounds = {name: torch.empty((), dtype=dtype, device=device) for name in BOUNDS} if is_clipped else {}

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [("linear", self.linear), *((name, Parameter(bound)) for name, bound in self.bounds.items())]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.bounds:
            return product(self.linear, x)
        out = product(self.linear, x.clamp(self.bounds["input_min"], self.bounds["input_max"]))
        return out.clamp(self.bounds["output_min"], self.bounds["output_max"])


class Gemma4TowerAttention(Module):
    def __init__(self, sizes: TowerSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, width = sizes, sizes.num_heads * sizes.head_dim
        self.q, self.k, self.v = (ClippedLinear(sizes.hidden_size, width, is_clipped=sizes.is_clipped, dtype=dtype,
                                                device=device) for _ in range(3))
        self.out = ClippedLinear(width, sizes.hidden_size, is_clipped=sizes.is_clipped, dtype=dtype, device=device)
        self.q_norm, self.k_norm = (RMSNorm(sizes.head_dim, sizes.eps, dtype=dtype, device=device) for _ in range(2))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("q_proj", self.q), ("k_proj", self.k), ("v_proj", self.v), ("o_proj", self.out),
                ("q_norm", self.q_norm), ("k_norm", self.k_norm))

    def __call__(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(1, (self.sizes.num_heads, -1)) for linear in (self.q, self.k, self.v))
        q, k = turn_by_place(self.q_norm(q), angles), turn_by_place(self.k_norm(k), angles)
        return self.out(attend_within_image(q, k, unweighted_norm(v, self.sizes.eps), SCALE).flatten(1))


def turn_by_place(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first half of each head by the patch's column, and the second half by its row."""
    return torch.cat([turn_halves(half, own) for half, own in zip(x.chunk(2, dim=-1), angles, strict=True)], dim=-1)


class Gemma4TowerMLP(Module):
    def __init__(self, sizes: TowerSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        wide = sizes.intermediate_size
        self.gate, self.up = (ClippedLinear(sizes.hidden_size, wide, is_clipped=sizes.is_clipped, dtype=dtype,
                                            device=device) for _ in range(2))
        self.down = ClippedLinear(wide, sizes.hidden_size, is_clipped=sizes.is_clipped, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("gate_proj", self.gate), ("up_proj", self.up), ("down_proj", self.down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Gemma4TowerLayer(Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, sizes: TowerSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        self.attention = Gemma4TowerAttention(sizes, dtype=dtype, device=device)
        self.mlp = Gemma4TowerMLP(sizes, dtype=dtype, device=device)
        self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm = (
            RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device) for _ in range(4))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("self_attn", self.attention),
            ("mlp", self.mlp),
            ("input_layernorm", self.input_norm),
            ("post_attention_layernorm", self.attention_norm),
            ("pre_feedforward_layernorm", self.mlp_norm),
            ("post_feedforward_layernorm", self.output_norm),
        )

    def __call__(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention_norm(self.attention(self.input_norm(x), angles))
        return x + self.output_norm(self.mlp(self.mlp_norm(x)))


class Gemma4Tower(VisionTower):
    prefixes = ("model.vision_tower.", "model.embed_vision.")
    unused = ("model.embed_vision.embedding.",)

    def __init__(self, config: ConfigReader, vision: ConfigReader, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self.sizes = sizes = TowerSizes.read(vision)
        self.pool = vision.get("pooling_kernel_size", int, 3, least=1)
        self.patches_per_token, self.patch_bytes = self.pool**2, 3 * vision.get("patch_size", int, 16, least=1) ** 2
        num_positions = vision.get("position_embedding_size", int, 10240, least=1)
        self.input = Linear(self.patch_bytes, sizes.hidden_size, bias=False, dtype=dtype, device=device)
        self.positions = torch.empty(2, num_positions, sizes.hidden_size, dtype=dtype, device=device)
        self.frequencies = rope_frequencies(sizes.head_dim // 2, read_theta(vision, 100.0), dtype, device)
        self.layers = [Gemma4TowerLayer(sizes, dtype=dtype, device=device)
                       for _ in range(vision.get("num_hidden_layers", int, 16, least=1))]
        self.standard = {name: torch.empty(sizes.hidden_size, dtype=dtype, device=device)
                         for name in ("std_bias", "std_scale")} if vision.get("standardize", bool, False) else {}
        self.projection = Linear(sizes.hidden_size, self.hidden_size, bias=False, dtype=dtype, device=device)
        self.levels = level_table(doubled_levels(), dtype, device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        tower = "model.vision_tower"
        return [
            (f"{tower}.patch_embedder.input_proj", self.input),
            (f"{tower}.patch_embedder.position_embedding_table", Parameter(self.positions)),
            *((f"{tower}.encoder.layers.{index}", layer) for index, layer in enumerate(self.layers)),
            *((f"{tower}.{name}", Parameter(tensor)) for name, tensor in self.standard.items()),
            ("model.embed_vision.embedding_projection", self.projection),
        ]

    def shorten(self) -> None:
        del self.layers[1:]

    def arrivals(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        """Yield the tensors, with bounds as single numbers, which some files store in a list of one. An infinite bound
        becomes the largest number, because the loader refuses infinite ones."""
        for name, tensor in super().arrivals(tensors):
            if name.endswith(BOUNDS) and isinstance(tensor, torch.Tensor):
                largest = torch.finfo(self.dtype).max
                tensor = tensor.to(self.dtype).clamp(-largest, largest)
                tensor = tensor.reshape(()) if tensor.numel() == 1 else tensor
            yield name, tensor
            del tensor  # before the next one is read

    def encode(self, patches: torch.Tensor, grid: ImageGrid) -> ImageFeatures:
        """Return the embeddings of one image. patches: row by row; the order of a patch's bytes is (row, column,
        colour)."""
        rows, cols = grid.rows * self.pool, grid.cols * self.pool
        x = embed_patches(patches, self.levels, lambda part: product(self.input, part))
        x = x + (self.positions[0, :cols] + self.positions[1, :rows, None]).flatten(0, 1)
        angles = self._angles(rows, cols)
        for layer in self.layers:
            x = layer(x, angles)
        pooled = unweighted_norm(self._standardized(self._pooled(x, grid)), self.sizes.eps)
        return ImageFeatures(product(self.projection, pooled))

    def _angles(self, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary angles of each patch for its column, and those for its row: [patches, head dim / 4]
        each."""
        by_col, by_row = (torch.arange(count, device=self.device).to(self.frequencies.dtype)[:, None] * self.frequencies
                          for count in (cols, rows))
        return by_col.repeat(rows, 1), by_row[:, None].expand(-1, cols, -1).flatten(0, 1)

    def _pooled(self, x: torch.Tensor, grid: ImageGrid) -> torch.Tensor:
        """Return the means of squares of patches, times the root of the hidden size. In float32, because float16
        overflows."""
        squares = widened(x).view(grid.rows, self.pool, grid.cols, self.pool, -1)
        means = squares.mean(dim=(1, 3)).flatten(0, 1).to(x.dtype)
        return widened(means) * self.sizes.hidden_size**0.5

    def _standardized(self, pooled: torch.Tensor) -> torch.Tensor:
        if self.standard:
            pooled = (pooled - widened(self.standard["std_bias"])) * widened(self.standard["std_scale"])
        return pooled.to(self.dtype)
