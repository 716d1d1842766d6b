"""A trained Gemma 4 assistant guesses well, alone, in batches and after hits, and shows when what it reads is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.drafters.base import Drafts, Step
from tests.drafters.rig import DraftRig
from tests.drafters.trained import DRAFTS, SPECULATIVE, mean_run, runs_of, trained_prompts, trained_rig
from tests.engine.harness import Ask, greedy, tokens_of


def sixteen_asks() -> list[Ask]:
    """Prompts of several windows; neighbours are in different modes, which their first tokens name."""
    texts = trained_prompts(41, (33,) * 40)
    modes = [*[0, 1, 2] * 5, 1]
    chosen = [texts.pop(next(i for i, text in enumerate(texts) if text[0] == mode)) for mode in modes]
    return [Ask(text[:length], greedy(36)) for text, length in zip(chosen, (8, 12, 20, 33) * 4, strict=True)]


TRAINED_ASKS = sixteen_asks()


@functools.cache
def own_run() -> tuple[float, dict[tuple[int, ...], tuple[int, ...]]]:
    """Mean run of the trained assistant, each request alone, and all it proposed."""
    with trained_rig() as rig:
        rig.run_one_by_one(TRAINED_ASKS)
        return mean_run(rig), {proposal.known: proposal.drafts for proposal in rig.proposals}


def test_a_trained_assistant_is_worth_its_drafts() -> None:
    mean, _ = own_run()
    assert mean >= 2.5
    ngram = {"method": "ngram", "num_speculative_tokens": DRAFTS, "auto": False}
    with trained_rig(speculative_config=ngram) as rig:
        rig.run(TRAINED_ASKS)
        tokens = [len(part.run) for result in rig.results for part in result.requests if part.run]
        assert sum(tokens) / len(tokens) < 1.5, "the texts must not be guessed by lookup"


def test_unchanged_in_a_batch_of_16_and_after_hits() -> None:
    mean, drafts = own_run()
    with trained_rig(max_num_seqs=16, max_num_batched_tokens=128, pad_requests=(16,), overlap=True) as rig:
        for is_hit in (False, True):
            rig.results.clear()
            rig.proposals.clear()
            outputs = rig.run(TRAINED_ASKS)
            hits = [output.metrics.num_cached_tokens for output in outputs]
            assert all(hit >= 16 for hit, ask in zip(hits, TRAINED_ASKS, strict=True) if len(ask.prompt) > 16) == is_hit
            assert max(batch.num_requests for batch in rig.batches) == 16
            assert {proposal.known: proposal.drafts for proposal in rig.proposals} == drafts
            assert mean_run(rig) == pytest.approx(mean)


def shuffled_hidden(rig: DraftRig) -> None:
    """Every request drafts from its neighbour's hidden state."""
    propose = rig._propose

    def shuffled(step: Step) -> Drafts:
        batch, final = step.batch.padded, step.hidden.final.clone()
        last = (batch.query_starts[:-1] + step.num_computed - 1).clamp_min(0)
        final[last] = final[last.roll(1)]
        return propose(replace(step, hidden=replace(step.hidden, final=final)))

    rig._propose = shuffled


def wrong_table(rig: DraftRig, of: int) -> None:
    """One kind of its layers reads the pages of the other kind's group."""
    drafter: Any = rig.step.drafter
    read, groups = drafter._batches.reading, [group.index for group in drafter._cached.groups]

    def crossed(step: Step, reading: Any) -> Any:
        right = read(step, reading)
        tables = list(right.page_tables)
        tables[groups[of]] = tables[groups[1 - of]]
        return replace(right, page_tables=tuple(tables))

    drafter._batches.reading = crossed


def wrong_sliding_table(rig: DraftRig) -> None:
    wrong_table(rig, 0)


def wrong_full_table(rig: DraftRig) -> None:
    wrong_table(rig, 1)


def wrong_position(rig: DraftRig) -> None:
    drafter: Any = rig.step.drafter
    drafter._behind += 2


@pytest.mark.parametrize("broken", [shuffled_hidden, wrong_sliding_table, wrong_full_table, wrong_position])
def test_a_broken_assistant_shows(broken: Callable[[DraftRig], None]) -> None:
    """The floor means nothing if an assistant that reads the wrong things reached it too. The text stays right."""
    mean, _ = own_run()
    with trained_rig(max_num_seqs=16, max_num_batched_tokens=128, num_pages=600) as rig, trained_rig(
        max_num_seqs=16, max_num_batched_tokens=128
    ) as right:
        broken(rig)
        assert tokens_of(rig.run(TRAINED_ASKS)) == tokens_of(right.run(TRAINED_ASKS))
        assert mean_run(rig) <= mean - 0.5
        assert len(runs_of(right)) < len(runs_of(rig))


def test_the_position_it_was_trained_for_is_the_better_one() -> None:
    mean, _ = own_run()
    with trained_rig(speculative_config=SPECULATIVE | {"assistant_position": "computed"}) as rig:
        rig.run(TRAINED_ASKS)
        assert mean_run(rig) <= mean - 0.5
