"""Counter-based noise: Philox 4x32-10, and Gumbel noise keyed by (seed, sample index, position, token id).

All arithmetic before the last step is on integers, so the bits are the same on every device and for every batch shape.
"""

from __future__ import annotations

import torch

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

LANES = 4  # words that one call of Philox yields
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LARGEST_BELOW_ONE = 1 - 2**-24  # as float32 knows it; also used in float64, so that both cut the same tail


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four words of 32 random bits for each element. All tensors are int64 in [0, 2^32) and are broadcast
    together.

    Counter words that do not vary along an axis may have size 1 there, which makes the first rounds cheaper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low halves of a 32 x 32 bit product. The product wraps around in int64, which keeps its 64
    bits. The right shift fills the high half with sign bits, which the mask removes."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def random_words(
    seed: torch.Tensor, sample_index: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor | None, vocab: int
) -> torch.Tensor:
    """Return random words [L, V], int64 in [0, 2^32): for each token id, word `id % 4` of Philox at the counter (id //
    4, position, sample index, 0)."""
    key = (seed[:, None] & _MASK, (seed[:, None] >> 32) & _MASK)
    if token_ids is None:
        counters = torch.arange(-(-vocab // LANES), device=seed.device)
    else:
        assert token_ids.shape == (vocab,), f"token_ids {tuple(token_ids.shape)} for a vocabulary of {vocab}"
        counters = token_ids // LANES
    zero = torch.zeros_like(position)[:, None]
    words = philox((counters[None], position[:, None] & _MASK, sample_index[:, None] & _MASK, zero), key)
    lanes = torch.stack(words, dim=-1)  # [L, counters, 4]
    if token_ids is None:
        return lanes.flatten(1)[:, :vocab]
    lane = (token_ids % LANES)[None, :, None].expand(lanes.shape[0], vocab, 1)
    return lanes.gather(2, lane).squeeze(2)


def gumbel(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | None,
    vocab: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return Gumbel noise [L, V] in `dtype` for keys [L] (int64). `token_ids` [V]: the columns' token ids in the target
    model; None: 0 to V.

    The large values, which win a draw, come from uniform numbers near 0, where floats are dense, so that they are
    finely resolved."""
    words = random_words(seed, sample_index, position, token_ids, vocab)
    uniform = ((words.to(dtype) + 0.5) * 2**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
