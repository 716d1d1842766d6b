"""Latent attention in exact mode, in plain torch: a token row has the same bits alone and among any other rows.

Every token row is computed by itself, over tiles of KEYS positions that begin at multiples of KEYS, so that a library
gets the same shapes whatever the batch and its longest context are. A tile in which the token row sees nothing does not
change its sums. This is slow: it is the definition, and serves small models on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import latent, latent_inputs
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts
from outrider.kernels.latent_inputs import IndexInputs, RopeRows

KEYS = 64  # positions of a tile


def write_latents(compressed: Tensor, q_norm: Tensor | None, latent_norm: Tensor, eps: float, rope: RopeRows,
                  slots: Tensor, cache: Tensor, index: IndexInputs | None) -> tuple[Tensor, Tensor]:
    """Norm, rotate and store the compressed vectors of each token row by itself; see `latent_inputs.write_latents` for
    the arguments."""
    if not len(compressed):
        return latent_inputs.write_latents(compressed, q_norm, latent_norm, eps, rope, slots, cache, index)
    rows = zip(compressed.split(1), rope.positions.split(1), slots.split(1), strict=True)
    made = [latent_inputs.write_latents(row.clone(), q_norm, latent_norm, eps, rope._replace(positions=position), slot,
                                        cache, index) for row, position, slot in rows]
    queries, weights = zip(*made, strict=True)
    return torch.cat(queries), torch.cat(weights)


def head_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply each head with its own matrix, one token row at a time; see `latent_inputs.head_products` for the
    arguments."""
    for row, to in zip(x.split(1), out.split(1), strict=True):
        latent_inputs.head_products(row.clone(memory_format=torch.contiguous_format), weight, to)


def choose_positions(q: Tensor, weights: Tensor, keys: Tensor, contexts: TokenContexts, chosen: Tensor,
                     scales: Tensor | None = None, counters: Tensor | None = None) -> None:
    """Choose positions for one token row at a time; see `latent.choose_positions` for the arguments."""
    num_keys = latent.check_choice(q, weights, keys, contexts, chosen)
    for row in range(q.shape[0]):
        own = contexts.cut(slice(row, row + 1))
        scores = _index_scores(q[row].clone(), weights[row : row + 1].clone(), keys, own, num_keys, scales)
        chosen[row] = latent.best_positions(scores, own, chosen.shape[1])[0]


def _index_scores(q: Tensor, weights: Tensor, keys: Tensor, contexts: TokenContexts, num_keys: int,
                  scales: Tensor | None) -> Tensor:
    """Return the indexer's scores [1, positions] of one token row: q [heads, dim], weights [1, heads]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = []
    for start in range(0, num_keys, KEYS):
        at = torch.arange(start, start + KEYS, device=q.device).clamp_max(num_keys - 1)
        own = latent.as_numbers(keys, scales, _cells(keys, contexts, at), wide)
        dots = q.to(wide) @ own.t()
        scores.append(weights.to(wide) @ dots.relu_())
    return torch.cat(scores, dim=1)[:, :num_keys]


def latent_attention(q: Tensor, cache: Tensor, contexts: TokenContexts, positions: Tensor, scale: float,
                     latent_dim: int, sinks: Tensor | None = None) -> Tensor:
    """Attend to chosen positions, one token row at a time; see `latent.latent_attention` for the arguments."""
    out = q.new_empty(*q.shape[:2], latent_dim)
    for row in range(q.shape[0]):
        out[row] = _attend(q[row].clone(), cache, contexts.cut(slice(row, row + 1)), positions[row], scale, latent_dim,
                           sinks)
    return out


def dense_latent_attention(q: Tensor, cache: Tensor, contexts: TokenContexts, num_positions: int, scale: float,
                           latent_dim: int, sinks: Tensor | None = None) -> Tensor:
    """Attend to all visible positions, with the same bits as `latent_attention` over all of them; see
    `latent.dense_latent_attention` for the arguments."""
    return latent_attention(q, cache, contexts, _every_position(contexts, num_positions), scale, latent_dim, sinks)


def _every_position(contexts: TokenContexts, num_positions: int) -> Tensor:
    """Return [tokens, num_positions]: the visible positions in order, then NOT_CHOSEN, as an indexer would list
    them."""
    listed = contexts.first[:, None] + torch.arange(num_positions, device=contexts.first.device)
    return torch.where(listed < contexts.stop[:, None], listed, NOT_CHOSEN)


def _entries(cache: Tensor, contexts: TokenContexts, positions: Tensor) -> Tensor:
    """Return the cache entries [positions, width] at these positions of a single token row's request."""
    return cache[_cells(cache, contexts, positions)]


def _cells(cache: Tensor, contexts: TokenContexts, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return (pages, cells within the pages) of these positions of a single token row's request."""
    pages = contexts.page_table[contexts.request_of, positions // cache.shape[1]].long()
    return pages, positions % cache.shape[1]


def _attend(q: Tensor, cache: Tensor, contexts: TokenContexts, positions: Tensor, scale: float,
            latent_dim: int, sinks: Tensor | None) -> Tensor:
    """Attend for one token row: q [heads, latent | rope], positions [chosen]. Returns [heads, latent]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    acc = q.new_zeros(q.shape[0], latent_dim, dtype=wide)
    peak = acc.new_full((q.shape[0], 1), -torch.inf)
    total = torch.zeros_like(peak)
    for start in range(0, len(positions), KEYS):
        own = positions[start : start + KEYS]
        own = torch.nn.functional.pad(own, (0, KEYS - len(own)), value=NOT_CHOSEN)
        is_chosen = own >= 0
        # A page may hold anything outside the context, and 0 x NaN is NaN.
        entries = torch.where(is_chosen[:, None], _entries(cache, contexts, own.clamp_min(0)).to(wide), 0.0)
        scores = torch.where(is_chosen, (q.to(wide) @ entries.t()) * scale, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(dim=1, keepdim=True))
        base = torch.where(new_peak == -torch.inf, 0.0, new_peak)
        shrink, shares = (peak - base).exp(), (scores - base).exp()
        total = total * shrink + shares.sum(dim=1, keepdim=True)
        acc = acc * shrink + shares @ entries[:, :latent_dim]
        peak = new_peak
    if sinks is not None:
        # A sink far above all scores makes the sum infinite, and the result 0, as it should be.
        total = total + (sinks.to(wide)[:, None] - torch.where(peak == -torch.inf, 0.0, peak)).exp()
    return (acc / torch.where(total > 0, total, 1.0)).to(q.dtype)
