"""The image part of Gemma 4 12B, which has no tower: one linear layer between norms turns a tile of 48 x 48 pixels into
a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.layers import Linear, Module, Parameter
from outrider.models.config import ConfigReader
from outrider.models.vision.base import ImageFeatures, VisionTower
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.levels import unit_levels
from outrider.models.vision.parts import BiasedNorm, embed_patches, level_table, product, unweighted_norm

NORM_EPS = 1e-5  # of the norms with a bias; the config's is of the last norm


class Gemma4TileEmbedder(VisionTower):
    prefixes = ("model.vision_embedder.", "model.embed_vision.")
    unused = ("model.embed_vision.embedding.",)
    patches_per_token = 1

    def __init__(self, config: ConfigReader, vision: ConfigReader, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        side = vision.get("patch_size", int, 16, least=1) * vision.get("pooling_kernel_size", int, 3, least=1)
        vision.must_equal("model_patch_size", side, default=side)
        self.patch_bytes = side * side * 3
        size = vision.get("mm_embed_dim", int, 3840, least=1)
        vision.must_equal("output_proj_dims", size, default=size)
        self.eps = vision.get("rms_norm_eps", float, 1e-6, least=0, most=1)
        num_positions = vision.get("mm_posemb_size", int, 1120, least=1)
        self.tile_norm = BiasedNorm(self.patch_bytes, NORM_EPS, dtype=dtype, device=device)
        self.dense = Linear(self.patch_bytes, size, bias=True, dtype=dtype, device=device)
        self.dense_norm, self.position_norm = (BiasedNorm(size, NORM_EPS, dtype=dtype, device=device)
                                               for _ in range(2))
        self.positions = torch.empty(num_positions, 2, size, dtype=dtype, device=device)
        self.projection = Linear(size, self.hidden_size, bias=False, dtype=dtype, device=device)
        self.levels = level_table(unit_levels(), dtype, device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("model.vision_embedder.patch_ln1", self.tile_norm),
            ("model.vision_embedder.patch_dense", self.dense),
            ("model.vision_embedder.patch_ln2", self.dense_norm),
            ("model.vision_embedder.pos_embedding", Parameter(self.positions)),
            ("model.vision_embedder.pos_norm", self.position_norm),
            ("model.embed_vision.embedding_projection", self.projection),
        )

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. Some files have transformers' names, in which one module contains all
        parts."""
        own = "model.embed_vision."
        if name.startswith(f"{own}multimodal_embedder."):
            return own + name.removeprefix(f"{own}multimodal_embedder.")
        if name.startswith((f"{own}patch_", f"{own}pos_")):
            return "model.vision_embedder." + name.removeprefix(own)
        return name

    def encode(self, patches: torch.Tensor, grid: ImageGrid) -> ImageFeatures:
        """Return the embeddings of one image. patches: its tiles, row by row; the order of a tile's bytes is (row,
        column, colour)."""
        x = embed_patches(patches, self.levels, self._embed)
        cols, rows = self.positions[: grid.cols, 0], self.positions[: grid.rows, 1]
        x = x + (cols + rows[:, None]).flatten(0, 1)
        x = unweighted_norm(self.position_norm(x), self.eps)
        return ImageFeatures(product(self.projection, x))

    def _embed(self, tiles: torch.Tensor) -> torch.Tensor:
        return self.dense_norm(product(self.dense, self.tile_norm(tiles)))
