"""The fused sampler against a plain one: noise, ties, NaN, odd vocabularies, strided logits, mapped ids; the whole
sampler with it and without; verdicts at chosen rates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.core import Limits
from outrider.core.draft_confidence import LEVEL_BITS, MOST_PLACES, TOP_LEVEL
from outrider.core.params import SamplingParams
from outrider.drafters import synthetic as acceptance
from outrider.drafters.synthetic import SyntheticAcceptance
from outrider.kernels import ops
from outrider.kernels.drafting import DraftVerdicts
from outrider.kernels.gpu import choose_scaled, draw_tokens, sample_logits
from outrider.kernels.gpu.drafts.synthetic import accept_at_rates
from outrider.kernels.gpu.sampling import draw as sampling
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.sample import (
    History,
    LogitRows,
    Sampled,
    SamplingRows,
    StepExtras,
    StepNeeds,
    draw,
    sample,
    sampler,
)
from outrider.sample.filters import scale
from outrider.sample.philox import gumbel
from tests.unit.made_requests import made_admission


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


@pytest.mark.parametrize("span", [2, 3, 16])
def test_a_program_may_take_many_tiles(device: torch.device, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many logit rows: the same tokens, ties included, as with a program for every tile."""
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)).round(decimals=1).to(device)
    logits[1, 4999] = float("nan")
    temperature = torch.tensor([0.0, 1.0, 0.7, 1e-3, 5.0, 0.0], device=device)
    seed, sample_index, position = keys(device, 6)
    row, by = torch.arange(5, -1, -1, device=device), SamplingKeys(temperature, seed, sample_index)

    def tokens() -> list[torch.Tensor]:
        return [sample_logits(logits, temperature, seed, sample_index, position),
                *draw_tokens(logits, row, position, by, any_sampled=True),
                *draw_tokens(logits, row, position, by, any_sampled=False),
                choose_scaled(logits, row, position, by)]

    wanted = tokens()
    monkeypatch.setattr(sampling, "_tiles_per_span", lambda num_tiles, sms: span)
    assert all(map(torch.equal, tokens(), wanted))


@pytest.mark.parametrize("likely", [(0, 1, 2, 3), (8, 1032, 2056), (5, 1500), (7,), range(2100)])
def test_likely_tokens_of_one_place_are_told_apart(device: torch.device, likely: Sequence[int],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A place keeps the least key of its tokens in all tiles. Where two of them could win, both scores count."""
    monkeypatch.setattr(sampling, "_tiles_per_span", lambda num_tiles, sms: 3)
    generator = torch.Generator().manual_seed(len(likely))
    logits = torch.full((16, 2100), -30.0)
    logits[:, list(likely)] = torch.rand(16, len(likely), generator=generator)
    logits[1:3, 11] = torch.tensor([float("inf"), float("nan")])
    logits[3], logits[4, 1:] = float("-inf"), float("-inf")
    logits = logits.to(device)
    temperature = torch.tensor([1.0, 0.7, 1.0, 2.0], device=device).repeat(4)
    seed = torch.randint(-(1 << 62), 1 << 62, (16,), generator=generator).to(device)
    row = torch.arange(16, device=device)
    by = SamplingKeys(temperature, seed, row)
    for _ in range(3):
        position = torch.randint(0, 4096, (16,), generator=generator).to(device)
        drawn = draw_tokens(logits, row, position, by, any_sampled=True)
        with ops.using("torch", draw.choose_scaled, draw.draw_tokens):
            assert all(map(torch.equal, drawn, draw.draw_tokens(logits, row, position, by, True)))


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


@pytest.mark.parametrize("vocab", [5, 9000])
def test_levels_are_the_probability_of_the_drawn_tokens(device: torch.device, vocab: int) -> None:
    """Greedy and sampled, over several spans of a vocabulary, beside the levels of drafts before; NaN and infinities
    have the lowest level."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.tensor([[0.1], [2], [9], [30], [4], [1]]) * torch.randn(6, vocab, generator=generator)).to(device)
    logits[4, 3], logits[5, 2] = float("nan"), float("inf")
    temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.0, 0.0], device=device)
    packed = torch.full((6,), 77, device=device)
    for place in (0, 1, MOST_PLACES - 1, MOST_PLACES):
        key = (*keys(device, 6)[:2], torch.full((6,), place, device=device))
        before = packed.clone()
        tokens = sample_logits(logits, temperature, *key, levels=sampling.DraftLevels(packed, place))
        share = logits.double().softmax(1).gather(1, tokens[:, None]).squeeze(1).nan_to_num(0.0) * TOP_LEVEL
        found = packed >> LEVEL_BITS * place & TOP_LEVEL if place < MOST_PLACES else 1 + share.long()
        near = (share - share.round()).abs() < 1e-4  # an edge between two levels
        assert bool(((found == 1 + share.long().clamp_max(TOP_LEVEL - 1)) | near).all())
        mask = (1 << LEVEL_BITS * place) - 1
        assert bool((packed & mask == before & mask).all()) or not place
    assert bool((packed > 0).all()), "the first place begins anew"


def test_mapped_ids_have_the_noise_of_what_they_stand_for(device: torch.device) -> None:
    vocab, generator = 1501, torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(6, vocab, generator=generator)).to(device)
    ids = torch.randperm(5000, generator=generator)[:vocab].to(device)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1e-3, 5.0, 0.0], device=device)
    key = keys(device, 6)
    drafts = torch.full((3, 6), -1, device=device)
    sample_logits(logits, temperature, *key, ids=ids, out=drafts[1])
    noise, hot = gumbel(*key, ids, vocab, torch.float32), temperature[:, None]
    wanted = ids[torch.where(hot > 0, logits / hot + noise, logits).argmax(dim=1)]
    assert torch.equal(drafts[1], wanted) and bool((drafts[[0, 2]] == -1).all())
    flat = torch.zeros_like(logits)
    assert sample_logits(flat, torch.zeros_like(temperature), *key, ids=ids).tolist() == [int(ids[0])] * 6
    # Drawn with the whole vocabulary, a token that is in both is drawn by the same noise.
    whole = torch.full((6, 5000), float("-inf"), device=device)
    whole[:, ids] = logits
    assert torch.equal(sample_logits(whole, temperature, *key), wanted)


LIMITS = Limits(max_requests=6, max_batched_tokens=64, max_len=40, max_drafts=3, vocab_size=1300)
TEMPERATURES = [0.0, 1.0, 0.7, 1e-3, 1e-30, 5.0]


def sampling_rows(device: torch.device, params: list[SamplingParams]) -> SamplingRows:
    rows = SamplingRows(LIMITS, device)
    rows.admit([made_admission(i + 1, [5, 5], 40, one, seed=(1 << 40) * i - 3, sample_index=i)
                for i, one in enumerate(params)])
    return rows


def logit_rows(device: torch.device, count: int) -> LogitRows:
    """Two of each request, requests backwards."""
    request = torch.arange(count, device=device).repeat_interleave(2)
    draft_index = torch.arange(2, device=device).repeat(count)
    return LogitRows(request, count - request, draft_index, 2 + draft_index + 7 * request)


def sampled_by(kind: str, logits: torch.Tensor, of: LogitRows, params: list[SamplingParams]) -> Sampled:
    """With the kernels of one kind, or with none."""
    rows = sampling_rows(logits.device, params)
    counts = [2] * len(params)
    needs = StepNeeds.from_params(params[::-1], counts)
    extras = StepExtras.from_params(params[::-1], counts, logits.device)
    ints = {"dtype": torch.int64, "device": logits.device}
    history = History(torch.full((7, 40), 5, **ints), torch.full((7,), 2, **ints), torch.full((7, 3), 9, **ints), 10)
    with ops.using(kind, sampler.sample_chunk, draw.draw_tokens, draw.choose_scaled):
        return sample(logits, of, rows, history, needs, extras)


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.5}]
)
def test_the_sampler_gives_the_same_with_kernels(device: torch.device, fields: dict[str, Any]) -> None:
    of = logit_rows(device, len(TEMPERATURES))
    logits = (4 * torch.randn(len(of), 1300, generator=torch.Generator().manual_seed(1))).to(device)
    logits[1, 7] = float("nan")
    logits[4, 1299] = float("inf")
    logits[5] = float("-inf")
    logits[8:10] *= 1e6  # shifted first, or a tiny temperature makes several infinite
    params = [SamplingParams(**({"temperature": temperature} | fields)) for temperature in TEMPERATURES]
    wanted, made = (sampled_by(kind, logits, of, params) for kind in ("reference", "triton"))
    assert torch.equal(made.tokens, wanted.tokens) and torch.equal(made.bad, wanted.bad)
    assert wanted.bad.tolist() == [i in (1, 4, 5) for i in range(len(of))]


def test_a_draw_is_the_choice_from_scaled_logits(device: torch.device) -> None:
    """Alone or beside a request that asks for more, a request is drawn the same: bits, not only up to near-ties."""
    rows = sampling_rows(device, [SamplingParams(temperature=temperature) for temperature in (0.3, 0.9, 1.7)])
    generator, count = torch.Generator().manual_seed(2), 10
    row = torch.randint(1, 4, (count,), generator=generator).to(device)
    position = torch.arange(count, device=device)
    temperature, seed, sample_index = (field[row] for field in rows.keys)
    # Two tokens whose scores are equal but for rounding.
    noise = gumbel(seed, sample_index, position, None, 2, torch.float32)
    logits = torch.randn(count, 1, generator=generator).to(device) * 30 - temperature[:, None] * noise
    tokens, bad = draw_tokens(logits, row, position, rows.keys, any_sampled=True)
    chosen = choose_scaled(scale(logits, row, rows), row, position, rows.keys)
    assert torch.equal(tokens, chosen) and not bad.any()
    unshifted = sample_logits(logits, temperature, seed, sample_index, position)
    assert not torch.equal(tokens, unshifted), "how it is rounded decides"


def test_only_a_draw_is_one_call(device: torch.device) -> None:
    of, logits = logit_rows(device, 2), torch.zeros(4, 11, device=device)
    for fields, calls in (({}, 1), ({"logprobs": 1}, 0), ({"top_k": 2}, 0), ({"presence_penalty": 1.0}, 0)):
        params = [SamplingParams(temperature=1.0, **fields) for _ in range(2)]  # type: ignore[arg-type]
        with mock.patch.object(sampling, "draw_tokens", wraps=draw_tokens) as called:
            sampled_by("triton", logits, of, params)
        assert called.call_count == calls


@pytest.mark.parametrize("rates", [((0.0,),), ((1.0,),), ((0.5, 0.2),), ((0.3, 1.0, 0.0),), ((1.0,), (0.0, 1.0))])
def test_verdicts_at_rates_equal_the_torch_code(device: torch.device, rates: tuple[tuple[float, ...], ...]) -> None:
    """Also where every second row has other rates."""
    generator, requests, most = torch.Generator().manual_seed(len(rates[0])), 80, 3
    request = torch.arange(requests, device=device).repeat_interleave(most + 1)
    draft_index = torch.arange(most + 1, device=device).repeat(requests)
    request, draft_index = (torch.cat((x, x.new_full((5,), y))) for x, y in
                            ((request, requests - 1), (draft_index, most + 1)))  # padded
    of = LogitRows(request, request % 7, draft_index, 3 + 2 * request + draft_index)
    drafts = torch.randint(0, 4, (requests, most), generator=generator).to(device)
    sampled = torch.randint(0, 4, (len(of),), generator=generator).to(device)
    seed = torch.randint(-(2**62), 2**62, (7,), generator=generator).to(device)
    synthetic = SyntheticAcceptance(rates, 5, device)
    found = []
    for kind in ("reference", "triton"):
        with ops.using(kind, acceptance.accept_at_rates):
            found.append(synthetic.apply(sampled, of, drafts, seed, 4))
    assert torch.equal(found[0], found[1])
    grid, own = found[1][:-5].view(requests, most + 1), sampled[:-5].view(requests, most + 1)
    assert torch.equal(grid[:, -1], own[:, -1]) and torch.equal(found[1][-5:], sampled[-5:])
    row = torch.arange(requests, device=device) % 7
    for (kind, own), j in itertools.product(enumerate(rates), range(most)):
        rate, is_own = own[min(j, len(own) - 1)], row % len(rates) == kind
        share = float((grid[is_own, j] == drafts[is_own, j]).float().mean())
        assert share == rate if rate in (0, 1) else abs(share - rate) < 0.15
    with ops.using("triton", acceptance.accept_at_rates):
        assert synthetic.apply(sampled, of, drafts[:, :0], seed, 4) is sampled


def test_newer_wrappers_name_what_is_wrong(device: torch.device) -> None:
    logits, zeros = torch.zeros(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    good = SamplingKeys(torch.zeros(3, device=device), zeros.new_zeros(3), zeros.new_zeros(3))
    for argument, row, position, own in (
        ("row", zeros[:1], zeros, good), ("row", zeros.int(), zeros, good), ("position", zeros, zeros[:1], good),
        ("temperature", zeros, zeros, good._replace(temperature=good.temperature[:2])),
    ):
        with pytest.raises(ValueError, match=f"draw_tokens: {argument} "):
            draw_tokens(logits, row, position, own, any_sampled=True)
        with pytest.raises(ValueError, match=f"choose_scaled: {argument} "):
            choose_scaled(logits, row, position, own)
    for argument, change in (("ids", {"ids": zeros}), ("out", {"out": zeros.int()})):
        with pytest.raises(ValueError, match=f"sample_logits: {argument} "):
            sample_logits(logits, good.temperature[:2], zeros, zeros, zeros, **change)
    batch = DraftVerdicts(zeros, zeros, zeros, zeros, zeros.new_zeros(1, 2))
    for argument, sampled, of, thresholds in (
        ("sampled", zeros.int(), batch, zeros[None]),
        ("verdicts.row", zeros, batch._replace(row=zeros[:1]), zeros[None]),
        ("verdicts.drafts", zeros, batch._replace(drafts=zeros.new_zeros(2, 2).t()), zeros[None]),
        ("thresholds", zeros, batch, zeros[None, :1]), ("thresholds", zeros, batch, zeros),
    ):
        with pytest.raises(ValueError, match=f"accept_at_rates: {argument} "):
            accept_at_rates(sampled, of, zeros, thresholds, vocab=4, row_step=1)
