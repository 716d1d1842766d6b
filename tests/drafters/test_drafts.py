"""Proposals in ragged, padded, paged batches equal those of a naive one-request reference, in float64.

A wrong drafter does not show in the text, so the drafts themselves are compared. Every case asserts from counters that
its condition occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.core.params import SamplingParams
from tests.drafters.checkpoints import KINDS, Drafter, make_drafter
from tests.drafters.reference import Reference
from tests.drafters.rig import DraftRig, Proposal
from tests.engine.harness import Ask, greedy, prompt_of, tiny_model

SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(10)),
    Ask([*SHARED, *prompt_of(2, 3)], SamplingParams(temperature=1.0, seed=7, max_tokens=8)),
    Ask([*SHARED[:16], *prompt_of(3, 25)], greedy(7, speculative=2)),
    Ask(prompt_of(4, 1), greedy(13)),
    Ask([*SHARED, *prompt_of(5, 6)], greedy(6, speculative=False)),
    Ask(prompt_of(6, 18), greedy(9, speculative=4)),
]
HEADS = tuple(kind for kind in KINDS if kind != "draft_model")
QUICK = {("eagle", "llama"), ("eagle_speculators", "gemma3"), ("eagle3", "gemma3"), ("eagle3_speculators", "llama"),
         ("mtp", "gemma3"), ("draft_model", "llama")}


def each_of(kinds: Iterable[str]) -> Any:
    """Every kind with both families, one of them in the quick tests."""
    cases = [(kind, family) for kind in kinds for family in ("llama", "gemma3")]
    return pytest.mark.parametrize(("kind", "family"), [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in cases])


EACH, EACH_HEAD = each_of(KINDS), each_of(HEADS)
MakeDrafter = Callable[[str, str], Drafter]


@pytest.fixture(scope="module")
def drafter_of(tmp_path_factory: pytest.TempPathFactory) -> MakeDrafter:
    root: Path = tmp_path_factory.mktemp("drafters")
    return cache(lambda kind, family: make_drafter(kind, family, root / f"{kind}-{family}"))


def assert_as_reference(proposals: list[Proposal], asks: list[Ask], drafter: Drafter, family: str,
                        valid_from: Callable[[Proposal], int] = lambda proposal: 0) -> None:
    reference = Reference(drafter, tiny_model(family))
    params = {tuple(ask.prompt): ask.params for ask in asks}
    expected: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
    for proposal in proposals:
        own = next(p for prompt, p in params.items() if proposal.known[: len(prompt)] == prompt)
        key = (proposal.known, len(proposal.drafts), valid_from(proposal))
        if key not in expected:
            expected[key] = reference.drafts(proposal.known, key[1], own, key[2])
        assert list(proposal.drafts) == expected[key], f"after {len(proposal.known)} tokens, valid from {key[2]}"


@EACH
def test_ragged_padded_batches_with_hits_and_preemptions(kind: str, family: str, drafter_of: MakeDrafter) -> None:
    """Prompts cut into chunks beside rows that decode, fewer drafts or none, padding that is partly filled, results
    two steps late, everyone preempted once with steps in flight."""
    drafter = drafter_of(kind, family)
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(7), max_num_seqs=4, overlap=True,
                  max_num_batched_tokens=23, max_model_len=64, pad_requests=(3, 8), pad_tokens=(6, 30)) as rig:
        rig.run(ASKS)
        late = rig.run(ASKS, after_step=rig.preempt)  # the second time with hits for everyone
        stats = rig.scheduler.stats
        assert stats.max_steps_in_flight == 2 and rig.runner.num_padded_steps > 0
        assert stats.num_preemptions == len(ASKS) and stats.num_dropped_results > 0
        assert any(output.metrics.num_cached_tokens >= 32 for output in late)
        assert any(not all(batch.samples) and any(batch.num_drafts) for batch in rig.batches), "chunks beside drafts"
        assert {len(p.drafts) for p in rig.proposals} == {7}
        assert_as_reference(rig.proposals, ASKS, drafter, family)


@EACH
def test_each_number_of_drafts_up_to_the_longest_length(kind: str, family: str, drafter_of: MakeDrafter) -> None:
    """Until max_model_len, where room for drafts runs out."""
    drafter, asks = drafter_of(kind, family), [Ask(prompt_of(8, 36), greedy(None)), Ask(prompt_of(9, 41), greedy(None))]
    for k in (1, 3, 5):
        with DraftRig(tiny_model(family), speculative_config=drafter.speculative(k), max_model_len=48) as rig:
            rig.run(asks)
            lengths = {len(p.drafts) for p in rig.proposals}
            assert lengths == set(range(1, k + 1)), "room for all, then for fewer"
            assert_as_reference(rig.proposals, asks, drafter, family)


@EACH
def test_equal_drafts_after_a_hit_and_after_a_preemption(kind: str, family: str, drafter_of: MakeDrafter) -> None:
    """The hit is longer than Gemma's window, whose first pages are gone by then."""
    drafter, ask = drafter_of(kind, family), Ask([*SHARED, *prompt_of(1, 41)], greedy(9))
    runs: list[dict[tuple[int, ...], tuple[int, ...]]] = []
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(4), max_num_batched_tokens=19) as rig:
        for after_step in (None, None, rig.preempt):
            rig.proposals.clear()
            (output,) = rig.run([ask], after_step=after_step)
            runs.append({p.known: p.drafts for p in rig.proposals})
            assert output.metrics.num_cached_tokens == (64 if len(runs) > 1 else 0)
        assert output.metrics.num_preemptions == 1
    assert runs[0] and runs[0] == runs[1]
    assert runs[0].items() <= runs[2].items(), "a resumed request may propose at other lengths, but nothing else"


@EACH
def test_cold_steps_leave_only_what_is_filled_since(kind: str, family: str, drafter_of: MakeDrafter) -> None:
    """Steps 2 to 4 propose nothing. The drafter then starts anew behind them."""
    drafter, ask = drafter_of(kind, family), Ask(prompt_of(10, 21), greedy(16))
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(3), enable_prefix_caching=False,
                  propose_at=lambda step: 0 if 2 <= step <= 4 else 3) as rig:
        rig.run([ask])
        assert rig.num_cold == 3
        lengths = [len(p.known) for p in rig.proposals]
        resumed = next(i for i, n in enumerate(lengths) if i > 0 and n - lengths[i - 1] > 3)
        # Step 5 computed the token before the last known one; the first slot it can fill is the last one's.
        begin = lengths[resumed] - 1
        assert_as_reference(rig.proposals, [ask], drafter, family,
                            lambda p: begin if len(p.known) >= lengths[resumed] else 0)


@EACH_HEAD
def test_a_hit_on_cold_pages_starts_behind_them(kind: str, family: str, drafter_of: MakeDrafter) -> None:
    """The hit's last page has no hidden state to go on from, so its next slot is missing too."""
    drafter, ask = drafter_of(kind, family), Ask([*SHARED, *prompt_of(1, 9)], greedy(6))
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(3),
                  propose_at=lambda step: 3 if rig.is_warm else 0) as rig:
        rig.is_warm = False  # type: ignore[attr-defined]
        rig.run([ask])
        assert not rig.proposals
        rig.is_warm = True  # type: ignore[attr-defined]
        (output,) = rig.run([ask])
        hit = output.metrics.num_cached_tokens
        assert hit >= 32
        assert_as_reference(rig.proposals, [ask], drafter, family, lambda p: hit + 1)


@pytest.mark.parametrize("kind", HEADS)
def test_a_hit_on_pages_partly_cold_uses_the_warm_tail(kind: str, drafter_of: MakeDrafter) -> None:
    """Chunks of 16, the prompt's first two cold: its page of tokens 32 to 47 lacks a slot, the next one is whole."""
    drafter, ask = drafter_of(kind, "llama"), Ask(prompt_of(11, 70), greedy(6))
    with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(3), max_num_batched_tokens=16,
                  propose_at=lambda step: 0 if step < 2 else 3) as rig:
        rig.run([ask])
        first = list(rig.proposals)
        rig.proposals.clear()
        (output,) = rig.run([ask])
        assert output.metrics.num_cached_tokens == 64 and rig.num_cold == 2
        assert_as_reference(first, [ask], drafter, "llama", lambda p: 33)
        assert_as_reference(rig.proposals, [ask], drafter, "llama", lambda p: 48)
