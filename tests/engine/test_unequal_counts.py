"""Requests of one captured step with different numbers of drafts: the tokens of an engine without drafts, in float64.

Steps are padded to sizes that are no multiple of the requests, and a graph of any larger size stands in for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from outrider.core import decode_sizes
from outrider.core.costs import StepCosts
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.models.base import Model
from outrider.runner.graphs import keys
from outrider.sched.drafts import DraftCounts, DraftPlan, SizedDrafts, clamp_drafts
from outrider.sched.request import Request
from tests.drafters.hybrid_rig import mtp_of, script_with_errors
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.recurrent_rig import HYBRIDS

K = 3
SETTINGS: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 96}
ASKS = [
    Ask(prompt_of(1, 9, 24), greedy(21)),
    Ask(prompt_of(2, 4, 24), SamplingParams(temperature=1.0, seed=7, max_tokens=18)),
    Ask(prompt_of(3, 17, 24), greedy(20)),
    Ask(prompt_of(4, 2, 24), greedy(9)),
    Ask(prompt_of(5, 6, 24), SamplingParams(temperature=1.0, seed=8, max_tokens=22)),
]


class UnequalDrafts(DraftCounts):
    """Other counts for every request in every step, from none to the most."""

    def __init__(self, most: int) -> None:
        self._most, self._step = most, 0

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        self._step += 1
        counts = [(3 * request.id + self._step * (1 + request.id)) % (1 + self._most) for request in requests]
        return DraftPlan([clamp_drafts(request, count, is_exact) if request.yields_tokens else 0
                          for request, count in zip(requests, counts, strict=True)], self._most)


@contextmanager
def sizes_apart(rows: int) -> Iterator[None]:
    """Sizes of few requests as those of many: so many token rows apart."""
    with (mock.patch.object(decode_sizes, "FEW", 1), mock.patch.object(keys, "FEW", 1),
          mock.patch.object(decode_sizes, "ROW_STEP", rows)):
        yield


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def model_of(family: str) -> Model:
    if family in HYBRIDS:
        return random_model(HYBRIDS[family], torch.float64, 3)
    return random_model(LATENT[family], torch.float64, 1) if family in LATENT else tiny_model(family, torch.float64)


@pytest.mark.parametrize(("family", "drafter", "stands_in"), [
    ("llama", "scripted", False), ("mamba2", "scripted", False), ("gated_delta", "scripted", True),
    ("kda", "scripted", False), long("gemma3", "scripted", True), long("deepseek_v32", "scripted", False),
    long("deepseek_v32", "mtp", False),
])
def test_tokens_are_those_without_drafts(family: str, drafter: str, stands_in: bool) -> None:
    model = model_of(family)
    with Rig(model, **SETTINGS) as rig:
        wanted = tokens_of(rig.run(ASKS))
    right = {tuple(ask.prompt): run for ask, (run,) in zip(ASKS, wanted, strict=True)}
    made: Drafter = ScriptedDrafter(K, script_with_errors(right, range(1, K + 2)))
    if drafter == "mtp":
        made = mtp_of(model, K)
    with Rig(model, drafter=made, **SETTINGS) as rig, sizes_apart(3):
        rig.scheduler._drafts = UnequalDrafts(K)
        captured = AsCaptured(rig, takes_prompts=rig.step.recurrent.needs_no_counts, stands_in=stands_in)
        assert tokens_of(rig.run(ASKS)) == wanted
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
    settings = SETTINGS | {"max_num_seqs": 12, "max_num_batched_tokens": 96}
    with Rig(model, **settings) as rig:
        wanted = tokens_of(rig.run(asks))
    right = {tuple(ask.prompt): run if i % 2 else [(token + 1) % 24 for token in run]
             for i, (ask, (run,)) in enumerate(zip(asks, wanted, strict=True))}
    with Rig(model, drafter=ScriptedDrafter(K, lambda prompt, index: right[prompt]), **settings) as rig:
        rig.scheduler._drafts = SizedDrafts(K, StepCosts((1, 12, 48), (1.0, 1.05, 2.8), is_padded=True))
        captured = AsCaptured(rig)
        assert tokens_of(rig.run(asks)) == wanted
    unequal = [batch for batch in rig.batches if len(set(batch.num_drafts)) > 1 and batch.num_requests == 12]
    good, bad = (sum(n for batch in unequal for owner, n in zip(batch.request_ids, batch.num_drafts, strict=True)
                     if owner % 2 == own) for own in (1, 0))
    assert len(unequal) > 5 and good > 5 * bad
    assert any(key.tokens < key.requests * (1 + K) and key.num_wanted == K and key.has_drafts for key in captured.met)
