"""Runs in which requests of one captured step have different numbers of drafts, beside an engine without drafts.

Everything is in float64, so tokens must be the same. Steps are padded to sizes that are no multiple of the requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from outrider.core import decode_sizes
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.models.base import Model
from outrider.runner.graphs import keys
from outrider.sched.request import Request
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, clamp_drafts
from tests.drafters.hybrid_rig import mtp_of, script_with_errors
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, choose_drafts, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.recurrent_rig import ALONE, HYBRIDS

K = 3
SETTINGS: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 96}
ASKS = [
    Ask(prompt_of(1, 9, 24), greedy(21)),
    Ask(prompt_of(2, 4, 24), SamplingParams(temperature=1.0, seed=7, max_tokens=18)),
    Ask(prompt_of(3, 17, 24), greedy(20)),
    Ask(prompt_of(4, 2, 24), greedy(9)),
    Ask(prompt_of(5, 6, 24), SamplingParams(temperature=1.0, seed=8, max_tokens=22)),
]
MANY = SETTINGS | {"max_num_seqs": 12, "max_num_batched_tokens": 96}  # settings for twelve requests


class UnequalDrafts(DraftCounts):
    """Other counts for every request in every step, from none to the most."""

    def __init__(self, most: int) -> None:
        self._most, self._step = most, 0

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        self._step += 1
        counts = [(3 * request.id + self._step * (1 + request.id)) % (1 + self._most) for request in requests]
        return DraftPlan([clamp_drafts(request, count, is_exact) if request.yields_tokens else 0
                          for request, count in zip(requests, counts, strict=True)], self._most)


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def model_of(family: str) -> Model:
    if family in HYBRIDS | ALONE:
        return random_model((HYBRIDS | ALONE)[family], torch.float64, 3)
    return random_model(LATENT[family], torch.float64, 1) if family in LATENT else tiny_model(family, torch.float64)


@contextmanager
def sizes_apart(rows: int) -> Iterator[None]:
    """Sizes of few requests as those of many: so many token rows apart."""
    with (mock.patch.object(decode_sizes, "FEW", 1), mock.patch.object(keys, "FEW", 1),
          mock.patch.object(decode_sizes, "ROW_STEP", rows)):
        yield


def lines_of(asks: list[Ask], tokens: list[list[list[int]]]) -> dict[tuple[int, ...], list[int]]:
    """The tokens of each prompt, as drafters that know them look them up."""
    return {tuple(ask.prompt): run for ask, (run,) in zip(asks, tokens, strict=True)}


def plain_tokens(model: Model, asks: list[Ask], **settings: Any) -> list[list[list[int]]]:
    """The tokens of an engine without drafts."""
    with Rig(model, **settings) as rig:
        return tokens_of(rig.run(asks))


class CapturedRun(NamedTuple):
    rig: Rig
    captured: AsCaptured


def run_captured(family: str, drafter: str, counts: DraftCounts, *, stands_in: bool,
                 scripted: type[ScriptedDrafter] = ScriptedDrafter) -> CapturedRun:
    """Run ASKS in captured steps with these counts of drafts, and compare the tokens with those without drafts.
    drafter: "mtp", or "scripted" for one that knows the tokens and errs at chosen places."""
    model = model_of(family)
    wanted = plain_tokens(model, ASKS, **SETTINGS)
    errs = script_with_errors(lines_of(ASKS, wanted), range(1, K + 2))
    made: Drafter = mtp_of(model, K) if drafter == "mtp" else scripted(K, errs)
    with Rig(model, drafter=made, **SETTINGS) as rig, sizes_apart(3):
        choose_drafts(rig.scheduler, counts)
        captured = AsCaptured(rig, takes_prompts=rig.step.recurrent.needs_no_counts, stands_in=stands_in)
        assert tokens_of(rig.run(ASKS)) == wanted
    return CapturedRun(rig, captured)
