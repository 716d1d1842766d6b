"""Attention to the blocks of a context that an indexer chose, in plain torch: the reference of its kernels.

A *block* is `size` consecutive tokens; block s begins at position `anchor + s * size`. The indexer compares queries
with one key for each whole block: the mean of its tokens' keys, normed and rotated by the block's first position. A
query attends to the chosen blocks, and to the last tokens, which do not fill a block yet.

Index keys are stored in pages like other keys. A token's cell holds the token's own key until the block is whole; then
the cell of the block's last token holds the key of the block. A rejected draft is overwritten by the token that takes
its place, so nothing has to be undone. Everything is in flat token space, as in `latent.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.latent import NOT_CHOSEN, TokenContexts, write_entries
from outrider.kernels.latent_inputs import RopeRows
from outrider.kernels.reference import contain_non_finite, widened

MAX_ELEMENTS = 1 << 24  # of gathered keys that exist at a time


class TokenBlocks(NamedTuple):
    """The division of a text into blocks: consecutive tokens that share one index key of a layer."""

    size: int  # tokens
    anchor: int  # the position at which the first one begins

    @property
    def cell(self) -> int:
        """The cell that holds a block's key: its index within a page, modulo `size`."""
        return (self.anchor + self.size - 1) % self.size

    @property
    def shift(self) -> int:
        """The number to add to a block's number to get its index among the block keys of its request (see `keys`)."""
        return (self.anchor + self.size - 1) // self.size

    def keys(self, cache: Tensor) -> Tensor:
        """Return the block keys of a cache [pages, page tokens, dim] as a view [pages, page tokens / size, dim]."""
        return cache[:, self.cell :: self.size]

    def visible(self, contexts: TokenContexts) -> TokenContexts:
        """Return the range of whole blocks that each token row sees, as indices among the block keys."""
        first = (contexts.first - self.anchor).clamp_min(0).add(self.size - 1).div(self.size, rounding_mode="floor")
        stop = (contexts.stop - self.anchor).clamp_min(0).div(self.size, rounding_mode="floor")
        stop = torch.maximum(first, stop)
        return contexts._replace(first=first + self.shift, stop=stop + self.shift)


def write_block_keys(raw: Tensor, gain: Tensor, eps: float, rope: RopeRows, slots: Tensor, offsets: Tensor,
                     contexts: TokenContexts, cache: Tensor, blocks: TokenBlocks) -> None:
    """Write index keys raw [tokens, dim] to their slots; a token that completes a block writes the block's key instead.

    gain [dim]: weight of the RMS norm of the mean. rope: positions [tokens] in their requests, and the table of cos and
    sin. offsets [tokens]: how many tokens of the same request come before each one in this step; their keys need not be
    in the cache yet. cache [pages, page tokens, dim].
    """
    size, positions, page_tokens = blocks.size, rope.positions, cache.shape[1]
    write_entries(raw, cache, slots)
    begin = positions - (size - 1)
    completes = (slots >= 0) & (begin >= blocks.anchor) & ((begin - blocks.anchor) % size == 0)
    at = begin.clamp_min(0)[:, None] + torch.arange(size, device=raw.device)
    pages = contexts.page_table[contexts.request_of[:, None],
                                (at // page_tokens).clamp_max(contexts.page_table.shape[1] - 1)].long()
    total = widened(cache[pages[:, 0], at[:, 0] % page_tokens])
    for index in range(1, size):  # in one order for any number of token rows
        total = total + widened(cache[pages[:, index], at[:, index] % page_tokens])
    wide = widened((total / size).to(raw.dtype))
    normed = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gain).to(raw.dtype)
    turned = RopeRows(begin.clamp_min(0), rope.table).turn(normed[:, None], in_pairs=False)[:, 0]
    write_entries(turned, cache, torch.where(completes, slots, -1))


def write_keys_values(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write k and v [tokens, kv heads, dim] to their slots of caches [pages, page tokens, kv heads, dim]; slot -1 is
    not written."""
    for made, cache in zip(contain_non_finite(k, v), (k_cache, v_cache), strict=True):
        is_live = (slots >= 0)[:, None, None]
        pages, offsets = slots.clamp_min(0) // cache.shape[1], slots.clamp_min(0) % cache.shape[1]
        cache[pages, offsets] = torch.where(is_live, made.to(cache.dtype), cache[pages, offsets])


def block_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: TokenContexts, chosen: Tensor,
                    scale: float, blocks: TokenBlocks) -> Tensor:
    """Attend, for q [tokens, heads, dim], to the chosen blocks and to the tokens after the last whole block.

    chosen [tokens, most chosen]: indices among the block keys, ascending, then NOT_CHOSEN. k_cache and v_cache [pages,
    page tokens, kv heads, dim]. Returns [tokens, heads, dim]; 0 for token rows that see nothing.
    """
    positions = _listed(contexts, chosen, blocks)
    out = torch.empty_like(q)
    for rows in _chunks(q.shape[0], positions.shape[1] * q.shape[1] * q.shape[2]):
        out[rows] = _attend(q[rows], k_cache, v_cache, contexts.cut(rows), positions[rows], scale)
    return out


def exact_block_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: TokenContexts, chosen: Tensor,
                          scale: float, blocks: TokenBlocks) -> Tensor:
    """Compute `block_attention` for every token row by itself, so that a library gets the same shapes for any batch."""
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        own = contexts.cut(slice(row, row + 1))
        positions = _listed(own, chosen[row : row + 1].clone(), blocks)
        out[row] = _attend(q[row : row + 1].clone(), k_cache, v_cache, own, positions, scale)[0]
    return out


def every_block(contexts: TokenContexts, count: int) -> Tensor:
    """Return [tokens, count]: the indices of all blocks that a token row sees, from the result of
    `TokenBlocks.visible`, then NOT_CHOSEN. No token row may see more than `count` blocks."""
    places = contexts.first[:, None] + torch.arange(count, device=contexts.first.device)
    return torch.where(places < contexts.stop[:, None], places, NOT_CHOSEN).int()


def check_blocks(q: Tensor, k_cache: Tensor, contexts: TokenContexts, chosen: Tensor) -> None:
    """Raise ValueError unless the shapes of `block_attention`'s arguments agree."""
    if not q.shape[0] == contexts.request_of.shape[0] == chosen.shape[0]:
        raise ValueError(f"block_attention: these must have the same number of token rows: queries {q.shape[0]}, "
                         f"contexts {contexts.request_of.shape[0]}, chosen {chosen.shape[0]}")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"block_attention: the {q.shape[1]} query heads must be a multiple of the {k_cache.shape[2]} "
                         "KV heads")


def _listed(contexts: TokenContexts, chosen: Tensor, blocks: TokenBlocks) -> Tensor:
    """List the positions of chosen blocks and of the last tokens: [tokens, most chosen * size + size - 1]."""
    size, anchor = blocks.size, blocks.anchor
    begins = anchor + (chosen.long() - blocks.shift) * size
    of_blocks = (begins[..., None] + torch.arange(size, device=chosen.device)).masked_fill(
        chosen[..., None] < 0, NOT_CHOSEN).flatten(1)
    tail = anchor + (contexts.stop - anchor).clamp_min(0) // size * size
    last = tail[:, None] + torch.arange(size - 1, device=chosen.device)
    is_seen = (last >= contexts.first[:, None]) & (last < contexts.stop[:, None])
    return torch.cat((of_blocks, torch.where(is_seen, last, NOT_CHOSEN)), dim=1)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, contexts: TokenContexts, positions: Tensor,
            scale: float) -> Tensor:
    wide, num_kv = torch.promote_types(q.dtype, torch.float32), k_cache.shape[2]
    is_chosen, at = positions >= 0, positions.clamp_min(0)
    pages = contexts.page_table[contexts.request_of[:, None], at // k_cache.shape[1]].long()
    # A page may hold anything outside the context, and 0 x NaN is NaN.
    keys, values = (torch.where(is_chosen[..., None, None], cache[pages, at % cache.shape[1]].to(wide), 0.0)
                    for cache in (k_cache, v_cache))
    grouped = q.to(wide).unflatten(1, (num_kv, -1))
    scores = torch.einsum("rngd,rknd->rngk", grouped, keys) * scale
    shares = scores.masked_fill(~is_chosen[:, None, None], -torch.inf).softmax(dim=-1)
    shares = torch.where(is_chosen.any(dim=1)[:, None, None, None], shares, 0.0)  # rows that see nothing
    return torch.einsum("rngk,rknd->rngd", shares, values).flatten(1, 2).to(q.dtype)


def _chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, MAX_ELEMENTS // row_elements)
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))
