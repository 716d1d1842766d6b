"""The inputs of latent attention: norms, ropes and cache writes of compressed vectors, and products of single heads.

These are the plain torch references of the kernels. After a rope, rotated dimensions are stored in halves. If the
checkpoint has them in pairs (0 and 1, 2 and 3), the first of each pair goes to the first half and the second to the
second. Queries and keys have the same order, so their products do not change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.latent import write_entries

MAX_FP8 = 448.0
LEAST_SCALE = 2.0**-60


class RopeRows(NamedTuple):
    """The rope table and the positions of some token rows, and which dimensions rotate."""

    positions: Tensor  # [tokens]
    table: Tensor  # [positions, cos | sin]
    in_pairs: bool = True  # how those of latents and of their queries rotate
    index_at_end: bool = False  # index keys and their queries rotate in their last dimensions, not in their first

    def turn(self, x: Tensor, *, in_pairs: bool, at_end: bool = False) -> Tensor:
        """Rotate x [tokens, heads, rotating | rest], or [.., rest | rotating] with `at_end`. Returns [.., rotated |
        rest], with the rotated dimensions in halves."""
        size = self.table.shape[1]
        if not size:
            return x
        turning, rest = x[..., :size], x[..., size:]
        if at_end:
            rest, turning = x[..., : x.shape[-1] - size], x[..., x.shape[-1] - size :]
        low, high = turning.unflatten(-1, (-1, 2)).unbind(-1) if in_pairs else turning.chunk(2, dim=-1)
        cos, sin = self.table[self.positions].unsqueeze(1).chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        return torch.cat((turned.to(x.dtype), rest), dim=-1)


class IndexInputs(NamedTuple):
    """The indexer's arguments of `write_latents`."""

    num_heads: int
    norm_weight: Tensor  # [dim]
    norm_bias: Tensor
    scale: float  # of the head weights
    in_pairs: bool  # how the index keys rotate
    cache: Tensor  # [pages, page tokens, dim]
    scales: Tensor | None = None  # [pages, page tokens, 1] where keys are stored in fp8
    eps: float = 1e-6  # of the norm of index keys


def write_latents(compressed: Tensor, q_norm: Tensor | None, latent_norm: Tensor, eps: float, rope: RopeRows,
                  slots: Tensor, cache: Tensor, index: IndexInputs | None) -> tuple[Tensor, Tensor]:
    """Norm and rotate compressed vectors, and write latents and index keys to their slots.

    compressed [tokens, q | latent | rope | index key | head weights]: q is there only if `q_norm` is given, the last
    two only if `index` is. Returns the normed q [tokens, q], and the scaled head weights [tokens, index heads] in
    float32 or wider.
    """
    sizes = [0 if q_norm is None else len(q_norm), len(latent_norm), cache.shape[2] - len(latent_norm)]
    sizes += [0, 0] if index is None else [index.cache.shape[2], index.num_heads]
    q, latent, key, index_key, weights = compressed.split(sizes, dim=1)
    if q_norm is not None:
        q = _rms_norm(q, q_norm, eps)
    turned = rope.turn(key[:, None], in_pairs=rope.in_pairs)[:, 0]
    write_entries(torch.cat((_rms_norm(latent, latent_norm, eps), turned), dim=1), cache, slots)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if index is not None:
        normed = F.layer_norm(index_key, index.norm_weight.shape, index.norm_weight, index.norm_bias, index.eps)
        turned = rope.turn(normed[:, None], in_pairs=index.in_pairs, at_end=rope.index_at_end)[:, 0]
        if index.scales is not None:
            turned, scales = to_fp8(turned)
            write_entries(scales, index.scales, slots)
        write_entries(turned, index.cache, slots)
        weights = weights * index.scale
    return q, weights


def to_fp8(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return (fp8 numbers, scales [tokens, 1]) of keys [tokens, dim]. A scale is the smallest power of two with which
    the greatest number fits; dividing by a power of two rounds nothing."""
    wide = keys.float()
    least = (wide.abs().amax(dim=1, keepdim=True) * (1 / MAX_FP8)).clamp_min(LEAST_SCALE)
    # The next power of two: the bits of the exponent, one higher unless all others are 0.
    scales = ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, weight.shape, None, eps) * weight).to(x.dtype)


def rotate_queries(queries: Tensor, rope: RopeRows, q: Tensor, nope_dim: int, index_q: Tensor | None,
                   index_in_pairs: bool) -> None:
    """Rotate queries [tokens, heads x (nope | rope) | index heads x dim]. Their rotated parts are written to the last
    dimensions of q [tokens, heads, latent | rope], and to index_q [tokens, index heads, dim] if there is an indexer."""
    rope_dim = rope.table.shape[1]
    columns = q.shape[1] * (nope_dim + rope_dim)
    heads = queries[:, :columns].unflatten(1, (q.shape[1], -1))
    q[..., q.shape[2] - rope_dim :] = rope.turn(heads[..., nope_dim:], in_pairs=rope.in_pairs)
    if index_q is not None:
        index_q.copy_(rope.turn(queries[:, columns:].unflatten(1, index_q.shape[1:]), in_pairs=index_in_pairs,
                                at_end=rope.index_at_end))


def enter_latents(queries: Tensor, rope: RopeRows, q: Tensor, to_latent: Tensor, index_q: Tensor | None,
                  index_in_pairs: bool) -> None:
    """Do what `rotate_queries` does, and write the product of each head's other dimensions with its matrix of to_latent
    [heads, latent, nope] to the first dimensions of q."""
    num_heads, latent, nope = to_latent.shape
    rotate_queries(queries, rope, q, nope, index_q, index_in_pairs)
    heads = queries[:, : num_heads * (nope + rope.table.shape[1])].unflatten(1, (num_heads, -1))
    head_products(heads[..., :nope], to_latent, q[..., :latent])


def head_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply each head of x [tokens, heads, inputs] with its own matrix of weight [heads, outputs, inputs], and write
    the result to out [tokens, heads, outputs]."""
    out.copy_(torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
