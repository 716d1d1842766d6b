"""Latent attention (MLA) and the indexer before it, in plain torch: the reference of their kernels.

Everything is in flat token space: row r of queries, weights, ranges, scores, chosen positions and outputs is token r,
whether that token prefills, verifies or decodes. Rows that see nothing (dead and padded tokens) choose nothing and
attend to nothing. Shapes follow from the arguments' shapes alone, and the work is cut into chunks of token rows, so
that memory stays within a budget and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.fp8_cache import FP8, to_fp8

NOT_CHOSEN = -1
NUM_COUNTERS = 1  # int32 numbers for each token row with which the kernels choose positions
MAX_ELEMENTS = 1 << 24  # of the scores, or of the gathered cache entries, that exist at a time


class TokenContexts(NamedTuple):
    """The part of the cache that each token row sees: positions [first, stop) of its request."""

    page_table: Tensor  # [requests, columns]
    request_of: Tensor  # [tokens]
    first: Tensor  # [tokens]
    stop: Tensor  # [tokens]; not above `first` where the token row sees nothing

    def cut(self, rows: slice | Tensor) -> TokenContexts:
        return TokenContexts(self.page_table, self.request_of[rows], self.first[rows], self.stop[rows])


def visible_ranges(positions: Tensor, slots: Tensor, request_of: Tensor, lengths: Tensor,
                   starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (first, stop) of `TokenContexts` for token rows at these positions. A row sees its request's keys up to
    its own position, from `starts` [requests] on if that is given. A row without a slot sees nothing."""
    first = torch.zeros_like(positions) if starts is None else starts[request_of]
    return first, torch.where(slots >= 0, torch.minimum(positions + 1, lengths[request_of]), 0)


def write_entries(entries: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write entries [tokens, width] to their slots of cache [pages, page tokens, width]; slot -1 is not written."""
    is_live = (slots >= 0)[:, None]
    pages, offsets = slots.clamp_min(0) // cache.shape[1], slots.clamp_min(0) % cache.shape[1]
    entries = to_fp8(entries) if cache.dtype == FP8 != entries.dtype else entries.to(cache.dtype)
    if cache.dtype == FP8:  # which torch stores, but cannot select
        entries, cache = entries.view(torch.uint8), cache.view(torch.uint8)
    # Dead rows put back what the null page's first cell holds.
    cache[pages, offsets] = torch.where(is_live, entries, cache[pages, offsets])


def choose_positions(q: Tensor, weights: Tensor, keys: Tensor, contexts: TokenContexts, chosen: Tensor,
                     scales: Tensor | None = None, counters: Tensor | None = None) -> None:
    """Write into chosen [tokens, top_k] the visible positions with the highest scores, ascending, then NOT_CHOSEN.

    q [tokens, heads, dim], weights [tokens, heads], keys [pages, page tokens, dim]. The score of a key is the sum over
    heads of weight * relu(q . key); of equal scores the lower position wins. scales [pages, page tokens, 1]: the keys'
    scales if keys are stored in fp8. counters: zeros, at least [tokens, NUM_COUNTERS] int32, which a kernel may
    overwrite; without them it allocates its own.
    """
    num_keys = check_choice(q, weights, keys, contexts, chosen)
    for rows in _chunks(q.shape[0], num_keys):
        own = contexts.cut(rows)
        scores = _index_scores(q[rows], weights[rows], keys, own.page_table[own.request_of].long(), scales)
        chosen[rows] = best_positions(scores, own, chosen.shape[1])


def check_choice(q: Tensor, weights: Tensor, keys: Tensor, contexts: TokenContexts, chosen: Tensor) -> int:
    """Raise an error unless the arguments of `choose_positions` agree. Returns the number of positions that a page
    table has room for."""
    num_keys, top_k = contexts.page_table.shape[1] * keys.shape[1], chosen.shape[1]
    if not q.shape[0] == weights.shape[0] == contexts.request_of.shape[0] == chosen.shape[0]:
        raise ValueError(f"choose_positions: these must have the same number of token rows: queries {q.shape[0]}, "
                         f"weights {weights.shape[0]}, contexts {contexts.request_of.shape[0]}, chosen "
                         f"{chosen.shape[0]}")
    if num_keys < top_k:
        raise ValueError(f"choose_positions: cannot choose {top_k} of {num_keys} positions; attend to all of them "
                         "instead")
    return num_keys


def latent_attention(q: Tensor, cache: Tensor, contexts: TokenContexts, positions: Tensor, scale: float,
                     latent_dim: int, sinks: Tensor | None = None) -> Tensor:
    """Attend to chosen positions [tokens, chosen]; NOT_CHOSEN is ignored. The positions are those that
    `choose_positions` writes, which are all positions of a context that has no more than can be chosen.

    q [tokens, heads, latent | rope] and cache [pages, page tokens, latent | rope]: an entry as a whole is the key of
    all heads, and its latent part is their value. sinks [heads]: the score of one more key that every token row sees,
    whose value is 0. Returns [tokens, heads, latent].
    """
    out = q.new_empty(*q.shape[:2], latent_dim)
    for rows in _chunks(q.shape[0], positions.shape[1] * max(q.shape[1:])):
        out[rows] = _attend(q[rows], cache, contexts.cut(rows), positions[rows], scale, latent_dim, sinks)
    return out


def dense_latent_attention(q: Tensor, cache: Tensor, contexts: TokenContexts, num_positions: int, scale: float,
                           latent_dim: int, sinks: Tensor | None = None) -> Tensor:
    """Attend to every visible position, all of which are below `num_positions`. The rest is as in
    `latent_attention`."""
    out = q.new_empty(*q.shape[:2], latent_dim)
    for rows in _chunks(q.shape[0], num_positions * max(q.shape[1:])):
        own = contexts.cut(rows)
        out[rows] = _attend(q[rows], cache, own, every_position(own, num_positions), scale, latent_dim, sinks)
    return out


def latent_values(q: Tensor, cache: Tensor, contexts: TokenContexts, positions: Tensor | None, num_positions: int,
                  scale: float, to_values: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attend to chosen positions, or to every visible one if `positions` is None, and multiply each head's result with
    its matrix of to_values [heads, values, latent]. Returns [tokens, heads, values]."""
    latent_dim = to_values.shape[2]
    if positions is None:
        made = dense_latent_attention(q, cache, contexts, num_positions, scale, latent_dim, sinks)
    else:
        made = latent_attention(q, cache, contexts, positions, scale, latent_dim, sinks)
    return torch.einsum("rhl,hvl->rhv", made, to_values)


def every_position(contexts: TokenContexts, num_positions: int) -> Tensor:
    """Return [tokens, num_positions]: each position that the token row sees, and NOT_CHOSEN in place of all others."""
    every = torch.arange(num_positions, device=contexts.first.device)
    return torch.where(_is_visible(every, contexts), every, NOT_CHOSEN)


def _chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, MAX_ELEMENTS // row_elements)
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def _is_visible(positions: Tensor, contexts: TokenContexts) -> Tensor:
    """Return [tokens, positions]: whether a token row sees a position."""
    return (positions >= contexts.first[:, None]) & (positions < contexts.stop[:, None])


def _index_scores(q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, scales: Tensor | None) -> Tensor:
    """Return [rows, positions]: the scores of every position, invisible ones included. pages [rows, columns]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, columns, page_tokens = len(q), pages.shape[1], keys.shape[1]
    scores = torch.empty(rows, columns, page_tokens, dtype=wide, device=q.device)
    step = max(1, MAX_ELEMENTS // (rows * page_tokens * max(q.shape[1:])))
    for first in range(0, columns, step):
        own = as_numbers(keys, scales, (pages[:, first : first + step],), wide)  # [rows, columns, page tokens, dim]
        dots = torch.einsum("rhd,rcpd->rhcp", q.to(wide), own).relu_()
        scores[:, first : first + step] = torch.einsum("rh,rhcp->rcp", weights.to(wide), dots)
    return scores.flatten(1)


def as_numbers(keys: Tensor, scales: Tensor | None, cells: tuple[Tensor, ...], wide: torch.dtype) -> Tensor:
    """Return the index keys of some pages, or of cells of pages, multiplied by their scales if they are stored in
    fp8."""
    if scales is None:
        return keys[cells].to(wide)
    return keys.view(torch.uint8)[cells].view(keys.dtype).to(wide) * scales[cells].to(wide)


def best_positions(scores: Tensor, contexts: TokenContexts, top_k: int) -> Tensor:
    """Return [rows, top_k]: the visible positions with the highest scores [rows, positions], ascending, then
    NOT_CHOSEN.

    The sort is stable, since a library's top-k may take any of equal scores. Scores of invisible positions may be NaN,
    so they are replaced by -inf, and visible scores are kept above that, so that every visible position ranks first."""
    num_keys = scores.shape[1]
    is_visible = _is_visible(torch.arange(num_keys, device=scores.device), contexts)
    finite = scores.clamp_min(torch.finfo(scores.dtype).min)
    ranked = torch.where(is_visible, finite, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    count = (contexts.stop - contexts.first)[:, None]
    best = torch.where(torch.arange(top_k, device=scores.device) < count, ranked, num_keys).sort(dim=1).values
    return torch.where(best < num_keys, best, NOT_CHOSEN)


def _attend(q: Tensor, cache: Tensor, contexts: TokenContexts, positions: Tensor, scale: float,
            latent_dim: int, sinks: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    is_chosen, at = positions >= 0, positions.clamp_min(0)
    pages = contexts.page_table[contexts.request_of[:, None], at // cache.shape[1]].long()
    # A page may hold anything outside the context, and 0 x NaN is NaN.
    entries = torch.where(is_chosen[..., None], cache[pages, at % cache.shape[1]].to(wide), 0.0)
    scores = torch.einsum("rhd,rkd->rhk", q.to(wide), entries) * scale
    scores = scores.masked_fill(~is_chosen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(wide)[None, :, None].expand(len(scores), -1, 1)), dim=-1)
    shares = scores.softmax(dim=-1)[..., : is_chosen.shape[1]]
    shares = shares.masked_fill(~is_chosen[:, None], 0.0)  # rows that see nothing
    return torch.einsum("rhk,rkd->rhd", shares, entries[..., :latent_dim]).to(q.dtype)
