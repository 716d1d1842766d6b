"""F3: the indexer works in flat token space. Token row r of every input and output is token r, whatever stands beside
it: verification with any number of token rows, prefill chunks, dead tokens, padded requests and tokens.

The failure packed a padded decode batch with several tokens per request: lengths of all requests met rows of some, the
write-back had the padded count, and the packed view of the shared buffer could overwrite the rows of prefills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.kernels import ops
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts
from outrider.mixers.latent.latent_mixer import BoundLatentLayer, ListedPositions, WholeContext
from tests.drafters.latent_rig import TOP_K, VOCAB, latent_of
from tests.engine.harness import prompt_of
from tests.models.paged import PagedModel, Piece

FAMILIES = ("deepseek_v32", "glm_moe_dsa", pytest.param("hy_v4", marks=pytest.mark.long))
POISON = -99


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices are written into buffers full of positions that do not exist, so that a row left out shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(POISON) if options.get("dtype") in (torch.int32, torch.int64) else made

    monkeypatch.setattr(torch, "empty", poisoned)
    with torch.no_grad():
        yield


def choice_of(paged: PagedModel) -> torch.Tensor:
    """The last layer's, which depends on those of all layers before it."""
    last: BoundLatentLayer = paged.bound.mixer(paged.model.num_layers - 1)
    assert isinstance(last.chosen.latest, ListedPositions)
    return last.chosen.latest.positions


def prefilled(family: str, lengths: list[int], max_requests: int = 8) -> PagedModel:
    paged = PagedModel(latent_of(family), max_requests=max_requests, max_len=64)
    for request, length in enumerate(lengths):
        if length:
            paged.forward([Piece(request, prompt_of(request, length, VOCAB))])
    return paged


def assert_rows_are_tokens(family: str, lengths: list[int], pieces: list[Piece], **padding: int) -> None:
    """The batch gives every live token the choice and the logits that it gets alone, and nothing to other rows."""
    together = prefilled(family, lengths, len(lengths))
    logits = together.logits(pieces, **padding)
    chosen, row = choice_of(together), 0
    assert chosen.shape == (max(padding["tokens"], row), TOP_K)
    assert not (chosen == POISON).any(), "every row is written"
    for piece, found in zip(pieces, logits, strict=True):
        alone = prefilled(family, lengths, len(lengths))
        # One token of a long request more, so that the choice is not skipped for short contexts.
        wanted = alone.logits([piece, Piece(longest(lengths, piece), [3])])[0]
        count = len(piece.tokens)
        assert torch.equal(chosen[row : row + count], choice_of(alone)[:count])
        assert (found - wanted).abs().max() < 1e-11
        assert (chosen[row + count : row + count + piece.num_dead] == NOT_CHOSEN).all(), "dead tokens"
        row += count + piece.num_dead
    assert (chosen[row:] == NOT_CHOSEN).all(), "padded tokens"


def longest(lengths: list[int], piece: Piece) -> int:
    return max((length, request) for request, length in enumerate(lengths) if request != piece.request)[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_of_one_token_more_than_top_k_is_chosen_from(family: str) -> None:
    """A context of top_k tokens is taken whole; behind one token more every row attends to top_k positions."""
    paged = prefilled(family, [TOP_K])
    last: BoundLatentLayer = paged.bound.mixer(paged.model.num_layers - 1)
    assert isinstance(last.chosen.latest, WholeContext)
    paged.forward([Piece(0, [5])])
    (chosen,) = choice_of(paged).tolist()
    assert len(set(chosen)) == len(chosen) == TOP_K and set(chosen) < set(range(TOP_K + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_f3_verification_beside_prefill_chunks(family: str) -> None:
    """1 to k + 1 token rows per request, dead ones among them, short prefills and a chunk beside them."""
    lengths = [40, 33, 5, 50, 26, 0, 30, 23]
    pieces = [Piece(0, [5], 3), Piece(1, [6, 7, 8, 9]), Piece(6, prompt_of(9, 21, VOCAB)), Piece(2, [4, 5], 1),
              Piece(5, [8, 8, 7]), Piece(3, [3, 3, 4], 1), Piece(4, [9]), Piece(7, [5, 6])]
    assert_rows_are_tokens(family, lengths, pieces, requests=11, tokens=52)


@pytest.mark.parametrize("family", FAMILIES)
def test_f3_a_request_without_live_tokens_beside_others(family: str) -> None:
    together = prefilled(family, [40, 33, 30], 3)
    logits = together.logits([Piece(0, [5, 6]), Piece(1, [], 4), Piece(2, [7])], requests=5, tokens=9)
    chosen = choice_of(together)
    assert (chosen[2:6] == NOT_CHOSEN).all() and (chosen[7:] == NOT_CHOSEN).all()
    alone = prefilled(family, [40, 33, 30], 3)
    wanted = alone.logits([Piece(0, [5, 6]), Piece(2, [7])])
    assert torch.equal(chosen[[0, 1, 6]], choice_of(alone))
    assert all((a - b).abs().max() < 1e-11 for a, b in zip((logits[0], logits[2]), wanted, strict=True))


def test_f3_49_requests_of_two_rows_padded_to_52() -> None:
    """The batch that failed: 98 token rows, padded to 104."""
    family, lengths = "deepseek_v32", [26 + index % 20 for index in range(49)]
    together = prefilled(family, lengths, 49)
    pieces = [Piece(index, prompt_of(100 + index, 2, VOCAB)) for index in range(49)]
    logits = together.logits(pieces, requests=52, tokens=104)
    chosen = choice_of(together)
    assert chosen.shape == (104, TOP_K) and (chosen[98:] == NOT_CHOSEN).all()
    alone = prefilled(family, lengths, 49)
    for index in range(0, 49, 4):
        wanted = alone.logits([pieces[index]])[0]
        assert torch.equal(chosen[2 * index : 2 * index + 2], choice_of(alone))
        assert (logits[index] - wanted).abs().max() < 1e-11


def test_f3_a_row_depends_on_its_own_token_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, weights = torch.randn(9, 4, 6, generator=generator), torch.randn(9, 4, generator=generator)
    keys = torch.randn(11, 4, 6, generator=generator)
    contexts = TokenContexts(1 + torch.arange(10).view(2, 5), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1]),
                             torch.zeros(9, dtype=torch.int64), torch.tensor([15, 16, 17, 18, 0, 0, 12, 13, 0]))

    def choose() -> torch.Tensor:
        buffer = torch.full((15, 5), POISON)
        ops.choose_positions(q, weights, keys, contexts, buffer[3:12])
        assert (buffer[:3] == POISON).all() and (buffer[12:] == POISON).all(), "rows of nobody"
        return buffer[3:12]

    before, num_moved = choose(), 0
    for row in range(9):
        kept = q[row].clone(), weights[row].clone()
        q[row].neg_(), weights[row].neg_()
        others = torch.arange(9) != row
        after = choose()
        assert torch.equal(after[others], before[others])
        num_moved += not torch.equal(after[row], before[row])
        q[row], weights[row] = kept
    assert num_moved == 6, "every live row follows its own token"
