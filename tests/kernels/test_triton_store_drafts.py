"""The entry of drafts into the rows, with any integers that a drafter may return: the kernels against the torch code,
integer for integer, and the torch code against what it promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.kernels.step import FAULT, FAULT_VALUE, LEVELS, NUM_COUNTS, PROPOSED, Proposal, WrongValue

VOCAB, ROWS, MOST = 10, 6, 4
EXTREMES = [-(2**63), -(2**31) - 1, -47, -1, 2**31, 2**63 - 1]
COUNTS = st.one_of(st.integers(-2, MOST + 2), st.sampled_from(EXTREMES))
TOKENS = st.one_of(st.integers(0, VOCAB - 1), st.integers(-2, VOCAB + 1), st.sampled_from(EXTREMES))
LEVELS_OF_A_REQUEST = st.one_of(st.integers(0, 15**4), st.sampled_from(EXTREMES))


@dataclass(frozen=True)
class Offer:
    """What drafters return for the requests of a batch, by drafter and request."""

    tokens: list[list[list[int]]]
    counts: list[list[int]]
    goes_on: list[bool]
    is_on: list[int]
    fills: bool
    is_turned: bool
    levels: list[list[int] | None]  # of each drafter that says how sure it is


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    requests, wanted, drafters = draw(st.integers(1, 4)), draw(st.integers(1, MOST)), draw(st.integers(1, 3))

    def lists(of: Any, *sizes: int) -> Any:
        for size in reversed(sizes):
            of = st.lists(of, min_size=size, max_size=size)
        return draw(of)

    return Offer(lists(TOKENS, drafters, requests, wanted), lists(COUNTS, drafters, requests),
                 lists(st.booleans(), requests), lists(st.sampled_from([1, 1, 1, 0]), drafters),
                 draw(st.booleans()), draw(st.booleans()),
                 [draw(st.none() | st.lists(LEVELS_OF_A_REQUEST, min_size=requests, max_size=requests))
                  for _ in range(drafters)])


@dataclass
class Stored:
    drafts: torch.Tensor
    num_drafts: torch.Tensor
    levels: torch.Tensor
    counts: torch.Tensor


def store(kind: str, offer: Offer, device: torch.device) -> Stored:
    """The requests have rows 1, 2, ...; row 0 is the null row, which a padded request has."""
    requests = len(offer.goes_on)
    rows = torch.tensor([*range(1, requests + 1), 0], device=device)
    goes_on = torch.tensor([*offer.goes_on, False], device=device)
    proposals = []
    for tokens, counts, own in zip(offer.tokens, offer.counts, offer.levels, strict=True):
        wide = torch.tensor([*tokens, tokens[0]], device=device)
        wide = wide.t().contiguous().t() if offer.is_turned else wide
        levels = None if own is None else torch.tensor([*own, own[0]], device=device)
        proposals.append(Proposal(wide, torch.tensor([*counts, counts[0]], device=device), levels))
    out = Stored(*(torch.full(shape, value, device=device)
                   for shape, value in (((ROWS, MOST), 7), ((ROWS,), 3), ((ROWS,), 5),
                                        ((requests + 1, NUM_COUNTS), 9))))
    with ops.using(kind, ops.store_drafts):
        ops.store_drafts(rows, proposals, goes_on, torch.tensor(offer.is_on, device=device), vocab_size=VOCAB,
                         fills=offer.fills, drafts=out.drafts, num_drafts=out.num_drafts, levels=out.levels,
                         counts=out.counts)
    out.drafts[0] = out.num_drafts[0] = out.levels[0] = 0  # the null row's are never read
    return out


def assert_same(kind: str, offer: Offer, device: torch.device) -> None:
    expected = store("reference", offer, device)
    for name, found in vars(store(kind, offer, device)).items():
        assert torch.equal(found, getattr(expected, name)), name


@settings(max_examples=60, deadline=None)
@given(offers())
def test_native_code_equals_the_torch_code(offer: Offer) -> None:
    if not native.available():
        pytest.skip(native.reason())
    assert_same("native", offer, torch.device("cpu"))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offer=offers())
def test_the_kernel_equals_the_torch_code(device: torch.device, offer: Offer) -> None:
    assert_same("triton", offer, device)


def told(offer: Offer, request: int) -> tuple[list[int], int, WrongValue | None]:
    """The drafts of a request, their levels, and its first fault, by the words of `store_drafts`."""
    drafts: list[int] = []
    fault, levels = None, 0
    for drafter, (tokens, counts) in enumerate(zip(offer.tokens, offer.counts, strict=True)):
        count, own = counts[request], tokens[request]
        if not (offer.goes_on[request] and offer.is_on[drafter]):
            continue
        wrong = [token for token in own[: max(count, 0)] if not 0 <= token < VOCAB]
        if not 0 <= count <= len(own):
            fault = fault or WrongValue(drafter, False, count)
        elif wrong:
            fault = fault or WrongValue(drafter, True, wrong[0])
        elif not drafts:
            own_levels = offer.levels[drafter]
            drafts, levels = own[:count], own_levels[request] if own_levels and count else 0
    return drafts, levels, fault


@settings(max_examples=60, deadline=None)
@given(offers())
def test_rows_get_only_drafts_that_a_step_can_check(offer: Offer) -> None:
    out, wanted = store("reference", offer, torch.device("cpu")), len(offer.tokens[0][0])
    for request, goes_on in enumerate(offer.goes_on):
        drafts, levels, fault = told(offer, request)
        assert out.levels[request + 1] == out.counts[request, LEVELS] == levels
        count = wanted * goes_on if offer.fills else len(drafts)
        assert out.num_drafts[request + 1] == out.counts[request, PROPOSED] == count
        assert out.drafts[request + 1, :wanted].tolist() == drafts + [0] * (wanted - len(drafts))
        code, value = int(out.counts[request, FAULT]), int(out.counts[request, FAULT_VALUE])
        assert (WrongValue.from_code(code, value) if code else None) == fault
    assert bool((out.counts[:, :PROPOSED] == 9).all()) and bool((out.num_drafts[len(offer.goes_on) + 1 :] == 3).all())


def test_the_kernel_refuses_what_is_no_proposal(device: torch.device) -> None:
    good = Offer([[[1, 2], [3, 4]]], [[1, 2]], [True, True], [1], False, False, [[9, 9]])
    with pytest.raises(ValueError, match="store_drafts: tokens "):
        store("triton", replace(good, tokens=[[[1, 2]]]), device)
    with pytest.raises(ValueError, match="store_drafts: is_on "):
        store("triton", replace(good, is_on=[1, 1]), device)
    with pytest.raises(ValueError, match="store_drafts: levels of drafts "):
        store("triton", replace(good, levels=[[9]]), device)
