"""Dead tokens in the middle of a batch: the host schedules drafts that the device does not have, or that are wrong.

A drafter that follows a script makes every pattern of acceptance occur; the tokens stay those of an engine without.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CONFIGS, Rig, tiny_model, tokens_of
from tests.engine.test_exactness import ASKS, expected

DRAFTS = 3
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": DRAFTS, "auto": False}


def scripted(family: str, error_every: int) -> ScriptedDrafter:
    """Right but for every so many tokens; how many drafts there are changes with the length."""
    right = {tuple(ask.prompt): sample for ask, (sample,) in zip(ASKS, expected(family), strict=True)}

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        return [(t + 1) % 256 if (i + 1) % error_every == 0 else t for i, t in enumerate(right[prompt])]

    return ScriptedDrafter(DRAFTS, script, count=lambda position: position * 7 % (DRAFTS + 1))


@functools.cache
def patterns(family: str, overlap: bool, padded: bool, error_every: int) -> Any:
    """Runs once, checks the tokens, and gives (scheduled, live, accepted) drafts of every request and step."""
    padding = {"pad_requests": (4,), "pad_tokens": (16, 72)} if padded else {}
    with Rig(tiny_model(family), drafter=scripted(family, error_every), speculative_config=SPECULATIVE, overlap=overlap,
             max_num_seqs=3, max_num_batched_tokens=40, **padding) as rig:
        assert tokens_of(rig.run(ASKS)) == expected(family)
        assert rig.scheduler.stats.max_steps_in_flight == (2 if overlap else 1)
        return [
            (scheduled, part.num_drafted, part.num_accepted, index < batch.num_requests - 1)
            for batch, result in zip(rig.batches, rig.results, strict=True)
            for index, (scheduled, part) in enumerate(zip(batch.num_drafts, result.requests, strict=True))
        ]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("error_every", [2, 3, 5, 99])
@pytest.mark.parametrize("family", CONFIGS)
def test_drafts_that_are_not_there_change_nothing(family: str, error_every: int, padded: bool) -> None:
    seen = patterns(family, True, padded, error_every)
    assert any(live < scheduled and is_inside for scheduled, live, _, is_inside in seen), "dead tokens inside a batch"
    assert any(accepted > 0 for _, _, accepted, _ in seen)


@pytest.mark.parametrize("family", CONFIGS)
def test_drafts_without_overlap_change_nothing(family: str) -> None:
    assert any(accepted > 0 for _, _, accepted, _ in patterns(family, False, False, 3))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_accepted_count_occurs(family: str) -> None:
    seen = [entry for errors in (2, 3, 5, 99) for entry in patterns(family, True, False, errors)]
    assert {accepted for _, _, accepted, _ in seen} == set(range(DRAFTS + 1))
    assert {live - accepted for _, live, accepted, _ in seen} == set(range(DRAFTS + 1)), "and every rejected count"
