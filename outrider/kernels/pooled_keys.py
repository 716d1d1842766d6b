"""Index keys of whole blocks for latent attention (GLM5-Next), in plain torch: the reference of their kernels.

`token_blocks.py` says what a block is and where its key is stored in the pages. Here the key of a block is a weighted
sum of its tokens' normed keys. Each dimension has its own weights: the softmax over the block's tokens of the token's
gate plus a bias for its place in the block. A token's cells hold its key and its gate until the block is whole; then
the key cell of the block's last token holds the block's key. Chosen blocks are expanded to a list of positions, which
latent attention reads like any other choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.latent import NOT_CHOSEN, TokenContexts, write_entries
from outrider.kernels.reference import widened
from outrider.kernels.token_blocks import TokenBlocks


class PoolWeights(NamedTuple):
    """The model's weights from which the keys of blocks are computed."""

    norm_weight: Tensor  # [dim] of the layer norm of a token's key
    norm_bias: Tensor
    place_bias: Tensor  # [size, dim] added to the gates, by place in the block
    eps: float
    head_scale: float  # of the indexer's head weights


class PoolCells(NamedTuple):
    """The cells that token rows are written to: a step's slots and positions, and the caches."""

    slots: Tensor  # [tokens]
    positions: Tensor  # [tokens] in their requests
    offsets: Tensor  # [tokens] how many tokens of its request each one has before it in this step
    keys: Tensor  # [pages, page tokens, dim]
    gates: Tensor  # [pages, page tokens, dim]


def write_pooled_keys(packed: Tensor, weights: PoolWeights, cells: PoolCells, contexts: TokenContexts,
                      blocks: TokenBlocks) -> Tensor:
    """Write the normed keys and the gates of packed [tokens, key | head weights | gate] to their slots. If a token
    completes a block, the block's key is written in place of the token's key. Returns the scaled head weights [tokens,
    heads] in float32 or wider."""
    dim, size, page_tokens = len(weights.norm_weight), blocks.size, cells.keys.shape[1]
    key, heads, gate = packed.split((dim, packed.shape[1] - 2 * dim, dim), dim=1)
    normed = F.layer_norm(widened(key), (dim,), widened(weights.norm_weight), widened(weights.norm_bias), weights.eps)
    normed = normed.to(key.dtype)
    write_entries(normed, cells.keys, cells.slots)
    write_entries(gate, cells.gates, cells.slots)
    begin = cells.positions - (size - 1)
    completes = (cells.slots >= 0) & (begin >= blocks.anchor) & ((begin - blocks.anchor) % size == 0)
    at = begin.clamp_min(0)[:, None] + torch.arange(size, device=packed.device)
    pages = contexts.page_table[contexts.request_of[:, None],
                                (at // page_tokens).clamp_max(contexts.page_table.shape[1] - 1)].long()
    own = [(pages[:, place], at[:, place] % page_tokens) for place in range(size)]
    logits = [widened(cells.gates[cell]) + widened(weights.place_bias[place]) for place, cell in enumerate(own)]
    peak = logits[0]
    for each in logits[1:]:
        peak = torch.maximum(peak, each)
    shares = [(each - peak).exp() for each in logits]
    total, pooled = shares[0], shares[0] * widened(cells.keys[own[0]])
    for share, cell in zip(shares[1:], own[1:], strict=True):  # in one order for any number of token rows
        total, pooled = total + share, pooled + share * widened(cells.keys[cell])
    write_entries((pooled / total).to(packed.dtype), cells.keys, torch.where(completes, cells.slots, -1))
    return widened(heads) * weights.head_scale


def list_blocks(contexts: TokenContexts, chosen: Tensor, blocks: TokenBlocks) -> Tensor:
    """Return [tokens, (most chosen + 1) * size - 1]: the positions of the chosen blocks and of the tokens after the
    last whole block, then NOT_CHOSEN. A context that has no more positions than that is listed completely.

    chosen [tokens, most chosen]: indices among the keys of blocks, ascending, then NOT_CHOSEN."""
    size, anchor = blocks.size, blocks.anchor
    entry = torch.arange((chosen.shape[1] + 1) * size - 1, device=chosen.device)
    whole = (contexts.stop - anchor).clamp_min(0) // size
    tail = torch.maximum(anchor + whole * size, contexts.first)[:, None]
    num_chosen = (chosen >= 0).sum(dim=1, keepdim=True) * size
    place = chosen[:, (entry // size).clamp_max(chosen.shape[1] - 1)].long()
    listed = torch.where(entry < num_chosen, anchor + (place - blocks.shift) * size + entry % size,
                         tail + entry - num_chosen)
    is_short = (contexts.stop - contexts.first)[:, None] <= len(entry)
    listed = torch.where(is_short, contexts.first[:, None] + entry, listed)
    return torch.where(listed < contexts.stop[:, None], listed, NOT_CHOSEN).int()
