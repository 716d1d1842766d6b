"""Philox against published vectors, and the noise it yields: its distribution, its keys, its devices."""

from __future__ import annotations

import pytest
import torch

from outrider.sample.philox import gumbel, philox, random_words
from tests.unit.test_sample_reference import naive_gumbel, naive_philox

KNOWN_ANSWERS = [  # of Random123, philox4x32 with 10 rounds: counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def key_of(num: int, seed: int = 5, sample_index: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`num` keys that differ by position."""
    return torch.full((num,), seed), torch.full((num,), sample_index), torch.arange(num)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    c, k = ([torch.tensor([word]) for word in words(text)] for text in (counter, key))
    assert [int(word) for word in philox(tuple(c), tuple(k))] == words(output)
    assert naive_philox(words(counter), words(key)) == words(output)


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63 - 1, -(2**63) + 1, 0x123456789ABCDEF])
def test_noise_is_the_naive_noise_in_both_precisions(seed: int) -> None:
    key = (torch.tensor([seed, seed]), torch.tensor([0, 3]), torch.tensor([1, 100000]))
    expected = torch.tensor(
        [[naive_gumbel(seed, s, p, t) for t in range(11)] for s, p in [(0, 1), (3, 100000)]], dtype=torch.float64
    )
    torch.testing.assert_close(gumbel(*key, None, 11, torch.float64), expected, rtol=1e-13, atol=1e-13)
    single = gumbel(*key, None, 11, torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)


def test_token_ids_pick_the_columns_of_the_whole_vocabulary() -> None:
    whole = gumbel(*key_of(3), None, 50, torch.float64)
    ids = torch.tensor([49, 0, 7, 7, 12, 31])
    assert torch.equal(gumbel(*key_of(3), ids, len(ids), torch.float64), whole[:, ids])


def test_every_part_of_the_key_changes_the_noise() -> None:
    base = random_words(*key_of(1), None, 64)
    others = [key_of(1, seed=6), key_of(1, seed=5 + 2**32), key_of(1, sample_index=1), tuple(k + 1 for k in key_of(1))]
    for other in others:
        assert (random_words(*other, None, 64) != base).all()


def test_noise_is_finite_at_both_ends() -> None:
    uniform = torch.tensor([0.5 * 2**-32, 1 - 2**-24])
    smallest, largest = -(-torch.log1p(-uniform.double())).log().flip(0)
    noise = gumbel(*key_of(64), None, 4096, torch.float32)
    assert noise.isfinite().all() and noise.min() >= smallest - 1e-4 and noise.max() <= largest + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_greatest_sum_follows_the_softmax(dtype: torch.dtype) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, -4.0], dtype=dtype)
    num = 40000
    tokens = (logits + gumbel(*key_of(num, seed=11), None, len(logits), dtype)).argmax(dim=1)
    expected = logits.double().softmax(0) * num
    observed = torch.zeros(len(logits), dtype=torch.float64).scatter_add_(0, tokens, torch.ones(num).double())
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 29.9, f"chi-square {chi_square:.1f} with 7 degrees of freedom: 1 in 10000"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_bits_are_the_same_on_cuda() -> None:
    key = key_of(5, seed=-77)
    cuda = random_words(*(k.cuda() for k in key), None, 1001)
    assert torch.equal(cuda.cpu(), random_words(*key, None, 1001))
