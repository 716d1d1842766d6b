"""Acceptance against a loop over one request's tokens, and its corner cases by example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Finish, Limits
from outrider.sample import Accepted, SamplingRows, accept
from tests.unit.made_requests import made_admission

LIMITS = Limits(max_requests=6, max_batched_tokens=64, max_len=20, max_drafts=5, vocab_size=4, max_stop_ids=3)


@dataclass(frozen=True)
class Case:
    drafts: tuple[int, ...]  # scheduled
    num_drafts: int  # alive
    sampled: tuple[int, ...]  # one more than scheduled; none where the prompt is being computed
    bad: tuple[bool, ...]
    known: int
    end_len: int
    stop_ids: tuple[int, ...]
    samples: bool = True


def naive(case: Case) -> tuple[list[int], int, Finish]:
    """The run, the accepted drafts in it, and how it ends."""
    run: list[int] = []
    if not case.samples:
        return run, 0, Finish.NO
    for j, token in enumerate(case.sampled):
        if case.known + len(run) >= case.end_len:
            return run, max(len(run) - 1, 0), Finish.LENGTH
        if case.bad[j]:
            return run, max(len(run) - 1, 0), Finish.ERROR
        run.append(token)
        if token in case.stop_ids:
            return run, j, Finish.STOP
        if j >= case.num_drafts or case.drafts[j] != token:
            break
    return run, len(run) - 1, Finish.LENGTH if case.known + len(run) >= case.end_len else Finish.NO


def run_accept(cases: list[Case], width: int) -> Accepted:
    rows, row = SamplingRows(LIMITS, torch.device("cpu")), [LIMITS.max_requests - i for i in range(len(cases))]
    rows.admit([
        made_admission(r, [0], c.end_len, eos_ids=c.stop_ids) for c, r in zip(cases, row, strict=True)
    ])
    # Undefined where a request has no logit rows: here as many as there are.
    first_logit = [sum(len(c.sampled) for c in cases[:i]) for i in range(len(cases))]
    drafts = torch.full((len(cases), width), 3)  # unused cells hold tokens of earlier owners
    for i, c in enumerate(cases):
        drafts[i, : len(c.drafts)] = torch.tensor(c.drafts, dtype=torch.int64)
    bad = [b for c in cases for b in c.bad]
    return accept(
        torch.tensor([t for c in cases for t in c.sampled], dtype=torch.int64), torch.tensor(bad, dtype=torch.bool),
        torch.tensor(first_logit), drafts,
        torch.tensor([c.num_drafts for c in cases]), torch.tensor([c.samples for c in cases]),
        torch.tensor([c.known for c in cases]), rows, torch.tensor(row),
    )


TOKEN = st.integers(0, 3)


@st.composite
def case(draw: st.DrawFn) -> Case:
    drafts = tuple(draw(st.lists(TOKEN, max_size=LIMITS.max_drafts)))
    known = draw(st.integers(1, 12))
    num = 0 if draw(st.integers(0, 7)) == 0 else len(drafts) + 1
    sampled = list(drafts[:num]) + [draw(TOKEN)] * (num > 0)
    if sampled and draw(st.booleans()):
        sampled[draw(st.integers(0, num - 1))] = draw(TOKEN)
    bad = draw(st.lists(st.integers(0, 9).map(lambda n: n == 0), min_size=num, max_size=num))
    return Case(
        drafts=drafts if num else (), num_drafts=draw(st.integers(0, len(drafts))) if num else 0,
        sampled=tuple(sampled), bad=tuple(bad), known=known, end_len=known + draw(st.integers(0, 7)),
        stop_ids=tuple(draw(st.lists(TOKEN, max_size=2, unique=True))), samples=num > 0 and draw(st.booleans()),
    )


@given(st.lists(case(), min_size=1, max_size=LIMITS.max_requests), st.integers(0, 2))
@settings(max_examples=150)
def test_runs_agree_with_a_loop(cases: list[Case], spare: int) -> None:
    width = min(max(len(c.drafts) for c in cases) + spare, LIMITS.max_drafts)
    found = run_accept(cases, width)
    assert found.run.shape == (len(cases), width + 1)
    for i, one in enumerate(cases):
        run, num_accepted, finish = naive(one)
        length = int(found.run_len[i])
        assert found.run[i, :length].tolist() == run and not found.run[i, length:].any()
        assert int(found.num_accepted[i]) == num_accepted
        assert Finish(int(found.finish[i])) is finish


def outcome(**fields: object) -> tuple[list[int], int, Finish]:
    base = {"drafts": (1, 2), "num_drafts": 2, "sampled": (1, 2, 3), "bad": (False,) * 3, "known": 5, "end_len": 20,
            "stop_ids": ()}
    found = run_accept([Case(**{**base, **fields})], 2)  # type: ignore[arg-type]
    length = int(found.run_len[0])
    return found.run[0, :length].tolist(), int(found.num_accepted[0]), Finish(int(found.finish[0]))


def test_a_stop_id_ends_the_run_and_is_part_of_it() -> None:
    assert outcome() == ([1, 2, 3], 2, Finish.NO)
    assert outcome(stop_ids=(2,)) == ([1, 2], 1, Finish.STOP)
    assert outcome(stop_ids=(3,), sampled=(0, 3, 3)) == ([0], 0, Finish.NO), "3 was not reached"


def test_the_length_cuts_the_run_and_a_stop_id_at_the_end_is_a_stop() -> None:
    assert outcome(end_len=7) == ([1, 2], 1, Finish.LENGTH)
    assert outcome(end_len=7, stop_ids=(2,)) == ([1, 2], 1, Finish.STOP)
    assert outcome(end_len=7, stop_ids=(3,)) == ([1, 2], 1, Finish.LENGTH)
    assert outcome(end_len=8) == ([1, 2, 3], 2, Finish.LENGTH)


def test_a_dead_draft_is_not_accepted_even_if_it_agrees() -> None:
    assert outcome(num_drafts=1) == ([1, 2], 1, Finish.NO)
    assert outcome(num_drafts=0) == ([1], 0, Finish.NO)


def test_a_bad_logit_row_counts_only_where_it_is_reached() -> None:
    assert outcome(bad=(False, True, False)) == ([1], 0, Finish.ERROR)
    assert outcome(bad=(True, False, False)) == ([], 0, Finish.ERROR)
    assert outcome(bad=(False, False, True), num_drafts=1) == ([1, 2], 1, Finish.NO)
    assert outcome(bad=(False, True, False), stop_ids=(1,)) == ([1], 0, Finish.STOP)
    assert outcome(bad=(False, False, True), end_len=7) == ([1, 2], 1, Finish.LENGTH)
