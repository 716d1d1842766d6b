"""The fused sampler against a plain one: noise, ties, NaN, odd vocabularies, strided logits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.triton import sample_logits  # noqa: E402
from outrider.sample.philox import gumbel  # noqa: E402


def keys(device: torch.device, n: int) -> tuple[torch.Tensor, ...]:
    seed = torch.tensor([0, 1, -1, (1 << 40) + 17, -(1 << 62), 123456789012], device=device)[:n]
    return seed, torch.arange(n, device=device), torch.arange(n, device=device) * 1000


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("vocab", "logit_dtype"), [(1, FLOAT32), (5, FLOAT32), (1023, FLOAT32), (2500, FLOAT32), (1023, BFLOAT16)]
)
def test_sampling_equals_the_plain_sampler(device: torch.device, vocab: int, logit_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(6, vocab + 3, generator=generator)).to(device, logit_dtype)[:, :vocab]
    temperature = torch.tensor([0.0, 1.0, 0.7, 1e-3, 5.0, 0.0], device=device)
    seed, sample_index, position = keys(device, 6)
    tokens = sample_logits(logits, temperature, seed, sample_index, position)
    noise = gumbel(seed, sample_index, position, None, vocab, torch.float64)
    hot = temperature.double()[:, None]
    score = torch.where(hot > 0, logits.double() / hot.clamp(min=1e-30) + noise, logits.double())
    # Where float32 cannot tell the best two apart the choice is free; these seeds have no such case.
    best = score.topk(min(2, vocab), dim=-1).values
    assert vocab == 1 or bool(((best[:, 0] - best[:, 1]) > 1e-5)[hot[:, 0] > 0].all())
    assert tokens.dtype == torch.int64 and torch.equal(tokens, score.argmax(-1))


def test_ties_nan_and_infinities(device: torch.device) -> None:
    logits = torch.zeros(5, 2100, device=device)
    logits[0, 3] = logits[0, 1500] = 2.0
    logits[1] = float("-inf")
    logits[2] = float("nan")
    logits[2, 2099] = -5.0
    logits[3, 77] = float("inf")
    logits[4, :2099] = float("-inf")
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    cold, hot = torch.zeros(5, device=device), torch.ones(5, device=device)
    assert sample_logits(logits, cold, zeros, zeros, zeros).tolist() == [3, 0, 0, 77, 2099]
    assert sample_logits(logits, hot, zeros, zeros, zeros).tolist()[1:] == [0, 0, 77, 2099]


def test_a_row_depends_on_its_logits_and_key_alone(device: torch.device) -> None:
    logits = torch.randn(4, 1500, generator=torch.Generator().manual_seed(0)).to(device)
    temperature = torch.ones(4, device=device)
    seed, sample_index, position = keys(device, 4)
    whole = sample_logits(logits, temperature, seed, sample_index, position)
    part = sample_logits(logits[2:3], temperature[2:3], seed[2:3], sample_index[2:3], position[2:3])
    assert torch.equal(part, whole[2:3])
    same_key = torch.zeros(4, dtype=torch.int64, device=device)
    drawn = sample_logits(torch.zeros(4, 1500, device=device), temperature, seed, same_key, same_key)
    assert len(set(drawn.tolist())) == 4, "seeds give different noise"


def test_wrapper_names_what_is_wrong(device: torch.device) -> None:
    logits, zeros = torch.zeros(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for argument, change in (
        ("temperature", {"temperature": zeros}), ("seed", {"seed": zeros.int()}), ("position", {"position": zeros[:1]}),
        ("logits", {"logits": logits.t().contiguous().t()}),
    ):
        good = {"logits": logits, "temperature": logits[:, 0].contiguous()}
        good |= {"seed": zeros, "sample_index": zeros, "position": zeros}
        with pytest.raises(ValueError, match=f"sample_logits: {argument} "):
            sample_logits(**(good | change))
