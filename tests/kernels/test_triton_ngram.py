"""Lookup of n-grams: kernels against the reference, and the reference against a plain search."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import cpu as native
from outrider.kernels import reference
from outrider.kernels.gpu.drafts import ngram

FAR = 1 << 40  # in cells that nobody knows


def texts(seed: int, vocab: int, lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [ROWS, width], known [ROWS]); row 0 is the null row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (len(lengths) + 1, width), generator=generator)
    known = torch.tensor([0, *lengths])
    return torch.where(torch.arange(width) < known[:, None], tokens, FAR), known


def plain_search(text: list[int], most: int, min_n: int, max_n: int) -> list[int]:
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + most]
    return []


CASES = [(2, 1, 3), (5, 1, 2), (5, 2, 4), (30, 1, 4), (3, 3, 3)]


@pytest.mark.parametrize(("vocab", "min_n", "max_n"), CASES)
def test_the_reference_is_a_plain_search(vocab: int, min_n: int, max_n: int) -> None:
    lengths = [1, 2, 3, 7, 20, 40, 39, 0]
    tokens, known = texts(vocab, vocab, lengths, 40)
    rows = torch.tensor([5, 1, 2, 0, 3, 4, 6, 7, 8])
    drafts, counts = reference.find_ngram(tokens, known, rows, 40, 4, min_n, max_n)
    for row, found, count in zip(rows.tolist(), drafts.tolist(), counts.tolist(), strict=True):
        assert found[:count] == plain_search(tokens[row, : int(known[row])].tolist(), 4, min_n, max_n)


@pytest.mark.parametrize(("vocab", "min_n", "max_n"), CASES)
@pytest.mark.parametrize("kernels", ["triton", "in parts", "native"])
def test_find_ngram(vocab: int, min_n: int, max_n: int, kernels: str, device: torch.device,
                    monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "native" and (device.type != "cpu" or not native.available()):
        pytest.skip("native code is for the CPU, and needs a compiler")
    if kernels == "in parts":
        monkeypatch.setattr(ngram, "_PART", 16)
        monkeypatch.setattr(ngram, "_BLOCK", 8)
    module = native if kernels == "native" else ngram
    tokens, known = (t.to(device) for t in texts(vocab, vocab, [1, 2, 9, 17, 50, 64, 33, 0, 60], 64))
    rows = torch.tensor([9, 1, 2, 0, 0, 3, 4, 5, 6, 7, 8], device=device)[1:]
    for width, most in ((64, 4), (50, 1), (64, 3)):  # a row may know more than the bound
        wanted, number = reference.find_ngram(tokens, known, rows, width, most, min_n, max_n)
        drafts, counts = module.find_ngram(tokens, known, rows, width, most, min_n, max_n)
        assert torch.equal(counts, number) and int(counts.max()) > 0
        meant = torch.arange(most, device=device) < number[:, None]
        assert torch.equal(drafts[meant], wanted[meant]) and not drafts[~meant].any()


def test_wrapper_names_what_is_wrong(device: torch.device) -> None:
    tokens, known = (t.to(device) for t in texts(0, 5, [3, 4], 8))
    rows = torch.tensor([1, 2], device=device)
    for argument, call in (
        ("tokens", lambda: ngram.find_ngram(tokens.int(), known, rows, 8, 2, 1, 2)),
        ("known", lambda: ngram.find_ngram(tokens, known[1:], rows, 8, 2, 1, 2)),
        ("rows", lambda: ngram.find_ngram(tokens, known, rows[:, None], 8, 2, 1, 2)),
        ("width", lambda: ngram.find_ngram(tokens, known, rows, 9, 2, 1, 2)),
        ("min_n", lambda: ngram.find_ngram(tokens, known, rows, 8, 2, 3, 2)),
        ("num_wanted", lambda: ngram.find_ngram(tokens, known, rows, 8, 0, 1, 2)),
    ):
        with pytest.raises(ValueError, match=f"find_ngram: {argument} "):
            call()
