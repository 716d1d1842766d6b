"""Exact latent attention on the card, or under Triton's interpreter: against the reference, and bit against bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent
from outrider.kernels.gpu.latent import exact_latent, head_products
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts
from tests.kernels.test_triton_latent import (
    LENS,
    TOLERANCE,
    make_cache,
    make_contexts,
    make_sinks,
    spread,
)

SPLIT, TOP_K = 16, 20  # positions of a split in these tests; of a choice


def listed(contexts: TokenContexts) -> torch.Tensor:
    """[tokens, TOP_K] all positions of short contexts, some of longer ones, ascending."""
    rows = []
    for begin, end in zip(contexts.first.tolist(), contexts.stop.tolist(), strict=True):
        taken = sorted(sorted(range(begin, end), key=lambda position: position * 7 % 11)[:TOP_K])
        rows.append(taken + [NOT_CHOSEN] * (TOP_K - len(taken)))
    return torch.tensor(rows, device=contexts.first.device)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_has_the_same_bits_alone_and_for_longer_batches(device: torch.device, dtype: torch.dtype,
                                                                  has_sinks: bool,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token row alone, under the bound of its own context, against all of them under the batch's bound; in pieces;
    and whole contexts against the same positions listed."""
    contexts = make_contexts(device, LENS, columns=16)
    cache = make_cache(contexts, 16, dtype)
    q = spread(len(contexts.first), 3, 16, device=device, dtype=dtype)
    positions, sinks = listed(contexts), make_sinks(3, device, has_sinks)
    options: dict[str, Any] = {"split": SPLIT, "pdl": False}
    whole = exact_latent.exact_dense_latent_attention(q, cache, contexts, 60, 0.3, 12, sinks, **options)
    chosen = exact_latent.exact_latent_attention(q, cache, contexts, positions, 0.3, 12, sinks, **options)
    for found, wanted in ((whole, latent.dense_latent_attention(q, cache, contexts, 60, 0.3, 12, sinks)),
                          (chosen, latent.latent_attention(q, cache, contexts, positions, 0.3, 12, sinks))):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    is_short = contexts.stop - contexts.first <= TOP_K
    assert is_short.any() and not is_short.all() and torch.equal(whole[is_short], chosen[is_short])
    for row in range(0, len(q), 3):
        own, at = contexts.cut(slice(row, row + 1)), slice(row, row + 1)
        bound = max(1, int(own.stop))
        alone = exact_latent.exact_dense_latent_attention(q[at], cache, own, bound, 0.3, 12, sinks, **options)
        assert torch.equal(alone, whole[at]), row
        alone = exact_latent.exact_latent_attention(q[at], cache, own, positions[at], 0.3, 12, sinks, **options)
        assert torch.equal(alone, chosen[at]), row
    monkeypatch.setattr(exact_latent, "MAX_PART_ELEMENTS", 5 * 3 * 4 * 12)  # five token rows at a time
    pieces = exact_latent.exact_dense_latent_attention(q, cache, contexts, 60, 0.3, 12, sinks, **options)
    assert torch.equal(pieces, whole)


def test_the_choice_is_the_same_alone(device: torch.device) -> None:
    contexts = make_contexts(device, [(5, 0, 23), (6, 0, 61), (3, 7, 64)], columns=16)
    keys = make_cache(contexts, 6, torch.float32)
    q = spread(len(contexts.first), 5, 6, device=device, dtype=torch.float32)
    weights = spread(len(q), 5, device=device, dtype=torch.float32, seed=9)

    def choose(rows: slice) -> torch.Tensor:
        chosen = torch.empty(rows.stop - rows.start, TOP_K, dtype=torch.int64, device=device)
        exact_latent.exact_choose_positions(q[rows], weights[rows], keys, contexts.cut(rows), chosen, pdl=False)
        return chosen

    wanted = torch.empty(len(q), TOP_K, dtype=torch.int64, device=device)
    latent.choose_positions(q.double(), weights.double(), keys.double(), contexts, wanted)
    together = choose(slice(0, len(q)))
    assert torch.equal(together, wanted)
    for row in range(0, len(q), 2):
        assert torch.equal(choose(slice(row, row + 1)), together[row : row + 1])


@pytest.mark.parametrize("tokens", [2, 17, 70])
def test_products_of_heads_have_the_same_bits_alone(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    x = spread(tokens, 2, 40, device=device, dtype=dtype)
    weight = spread(2, 21, 40, device=device, dtype=dtype, seed=1)
    out, alone = (torch.empty(rows, 2, 21, device=device, dtype=dtype) for rows in (tokens, 1))
    head_products.head_products(x, weight, out, pdl=False)
    for row in (0, tokens - 1):
        head_products.head_products(x[row : row + 1], weight, alone, pdl=False)
        assert torch.equal(alone, out[row : row + 1])
