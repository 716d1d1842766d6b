"""Requests of one captured step with different numbers of drafts: the tokens of an engine without drafts, in float64.

Steps are padded to sizes that are no multiple of the requests, and a graph of any larger size stands in for them.
"""

from __future__ import annotations

import pytest

from outrider.core.costs import StepCosts
from outrider.speculation.sized_drafts import SizedDrafts
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, choose_drafts, greedy, prompt_of, tokens_of
from tests.engine.varied_drafts import MANY, K, UnequalDrafts, lines_of, long, model_of, plain_tokens, run_captured


@pytest.mark.parametrize(("family", "drafter", "stands_in"), [
    ("llama", "scripted", False), ("mamba2", "scripted", False), ("gated_delta", "scripted", True),
    ("kda", "scripted", False), ("mamba2_alone", "scripted", True), long("gemma3", "scripted", True),
    long("deepseek_v32", "scripted", False), long("deepseek_v32", "mtp", False),
])
def test_tokens_are_those_without_drafts(family: str, drafter: str, stands_in: bool) -> None:
    rig, captured = run_captured(family, drafter, UnequalDrafts(K), stands_in=stands_in)
    decoding = [key for key in captured.met if not key.has_prompts]
    assert any(key.tokens % key.requests for key in decoding), "sizes that no common number has"
    assert bool(captured.wider) == stands_in
    unequal = [batch for batch in rig.batches if len(set(batch.num_drafts)) > 1 and set(batch.num_known) == {1}]
    assert len(unequal) > 5
    accepted = {part.num_accepted for result in rig.results for part in result.requests if part.num_drafted}
    assert accepted >= ({0, 1} if drafter == "mtp" else set(range(K + 1)))


def test_requests_whose_drafts_hold_get_the_rows_of_those_whose_drafts_fail() -> None:
    """The scheduler's own choice, where token rows are dear: the drafts of every second request are always right, those
    of the others never are. Steps have fewer token rows than any number for all would need."""
    model, asks = model_of("llama"), [Ask(prompt_of(i, 4 + i % 3, 24), greedy(45)) for i in range(12)]
    wanted = plain_tokens(model, asks, **MANY)
    right = {prompt: run if i % 2 else [(token + 1) % 24 for token in run]
             for i, (prompt, run) in enumerate(lines_of(asks, wanted).items())}
    with Rig(model, drafter=ScriptedDrafter(K, lambda prompt, index: right[prompt]), **MANY) as rig:
        choose_drafts(rig.scheduler, SizedDrafts(K, StepCosts((1, 12, 48), (1.0, 1.05, 2.8), is_padded=True)))
        captured = AsCaptured(rig)
        assert tokens_of(rig.run(asks)) == wanted
    unequal = [batch for batch in rig.batches if len(set(batch.num_drafts)) > 1 and batch.num_requests == 12]
    good, bad = (sum(n for batch in unequal for owner, n in zip(batch.request_ids, batch.num_drafts, strict=True)
                     if owner % 2 == own) for own in (1, 0))
    assert len(unequal) > 5 and good > 5 * bad
    assert any(key.tokens < key.requests * (1 + K) and key.num_wanted == K and key.has_drafts for key in captured.met)
