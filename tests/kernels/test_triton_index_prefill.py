"""The search for the best positions of many token rows against a stable sort: numbers, ties, nothing but ties, contexts
of every size that programs serve, first positions anywhere, and NaN wherever nothing may be read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent
from outrider.kernels.gpu.index import prefill as index_prefill
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts

TOP_K = 7


def make_contexts(device: torch.device, columns: int) -> TokenContexts:
    """Token rows that see nothing, a few positions, and more than can be chosen, up to all of them."""
    ranges = [(0, 0), (5, 3), (0, 4), (2, 9), (3, 11), (0, 16), (17, 33), (1, 30), (0, 64), (15, 79), (40, 127),
              (0, 128)]
    first, stop = (torch.tensor(numbers, device=device) for numbers in zip(*ranges, strict=True))
    table = torch.zeros(1, columns, dtype=torch.int32, device=device)
    return TokenContexts(table, torch.zeros_like(first), first, stop)


def make_scores(kind: str, contexts: TokenContexts, columns: int) -> torch.Tensor:
    """[tokens, columns], NaN where no context is."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(len(contexts.first), columns, generator=generator).to(contexts.first.device)
    if kind == "ties":
        scores = (2 * scores).round().relu()
    if kind == "one score":
        scores.fill_(-3.0)
    if kind == "far apart":
        scores = scores.sign() * (30 * scores).exp()
    at = torch.arange(columns, device=scores.device)
    is_visible = (at >= contexts.first[:, None]) & (at < contexts.stop[:, None])
    return torch.where(is_visible, scores + 0.0, torch.nan)


@pytest.mark.parametrize("sizes", [(16, 64), (128,)], ids=["some in memory", "all in registers"])
@pytest.mark.parametrize("kind", ["numbers", "ties", "one score", "far apart"])
def test_the_best_are_those_of_a_stable_sort(device: torch.device, kind: str, sizes: tuple[int, ...]) -> None:
    contexts = make_contexts(device, 128)
    scores = make_scores(kind, contexts, 128)
    chosen = torch.full((len(scores), TOP_K), -99, device=device)
    index_prefill.write_best(scores, contexts, chosen, sizes=sizes, segment=16)
    assert torch.equal(chosen, latent.best_positions(scores, contexts, TOP_K))
    assert (chosen[:2] == NOT_CHOSEN).all() and (chosen[4:] >= 0).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # the middle of two infinities
def test_the_range_narrows_to_every_score(device: torch.device) -> None:
    """Whatever the scores, the search ends at the least one that is chosen: each of them in turn."""
    numbers = [-torch.inf, -1e38, -2.5, -1e-45, 0.0, 1e-45, 1e-3, 1.0, 1.0000001, 7.0, 3e38, torch.inf]
    scores = torch.tensor(numbers + [torch.nan] * 4, device=device).repeat(len(numbers), 1)
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    for top_k in range(1, len(numbers)):
        contexts = TokenContexts(zeros[None].int(), zeros, zeros, zeros + len(numbers))
        chosen = torch.full((1, top_k), -99, device=device)
        index_prefill.write_best(scores[:1], contexts, chosen, sizes=(16,), segment=16)
        assert chosen[0].tolist() == list(range(len(numbers) - top_k, len(numbers)))


def test_scores_stay_within_the_budget(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of scores has no interpreter: here the twin's are written in its place."""
    contexts = make_contexts(device, 128)
    table = torch.arange(1, 9, dtype=torch.int32, device=device)[None]
    contexts = contexts._replace(page_table=table)
    generator = torch.Generator().manual_seed(6)
    q, weights, keys = (torch.randn(*shape, generator=generator).to(device)
                        for shape in ((len(contexts.first), 4, 6), (len(contexts.first), 4), (9, 16, 6)))
    made: list[int] = []

    def write_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, top_k: int,
                     scores: torch.Tensor) -> None:
        made.append(scores.numel())
        pages = contexts.page_table[contexts.request_of].long()
        scores[: len(q)] = latent._index_scores(q, weights, keys, pages, None)

    monkeypatch.setattr(index_prefill, "launch_scores", write_scores)
    monkeypatch.setattr(index_prefill, "MAX_SCORES", 5 * 128 + 3)
    options: Any = {"dtype": torch.int32, "device": device}
    chosen, wanted = (torch.full((len(q), TOP_K), -99, **options) for _ in range(2))
    index_prefill.choose_positions(q, weights, keys, contexts, chosen)
    latent.choose_positions(q, weights, keys, contexts, wanted)
    assert torch.equal(chosen, wanted)
    assert made == [5 * 128] * 3
