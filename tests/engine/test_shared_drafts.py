"""Token rows of a captured step that the device shares out among drafts by how sure the drafter is of them: the tokens
of an engine without drafts, in float64, greedy and sampled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider.core.costs import StepCosts
from outrider.core.draft_confidence import CHANCE_BITS, LEVEL_BITS, NUM_LEVELS, TOP_LEVEL, WEIGHT_BITS
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafts, Step
from outrider.kernels import cpu as native
from outrider.sched.request import Request
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, SharingPlan
from outrider.speculation.sized_drafts import SizedDrafts
from tests.drafters.hybrid_rig import script_with_errors
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, choose_drafts, greedy, prompt_of, tiny_model, tokens_of
from tests.engine.varied_drafts import (
    ASKS,
    MANY,
    SETTINGS,
    K,
    lines_of,
    long,
    model_of,
    plain_tokens,
    run_captured,
    sizes_apart,
)

TABLE = [(level << CHANCE_BITS) // NUM_LEVELS for _ in range(K) for level in range(NUM_LEVELS)]


class SureDrafter(ScriptedDrafter):
    """Says how sure it is of its drafts: anything, or whether a draft will hold."""

    def propose(self, step: Step) -> Drafts:
        drafts = super().propose(step)
        places = torch.arange(drafts.tokens.shape[1])
        levels = (drafts.tokens * 7 + step.known[step.batch.padded.rows][:, None] * 5 + places * 3) % NUM_LEVELS
        return Drafts(drafts.tokens, drafts.counts, (levels << LEVEL_BITS * places).sum(dim=1))


class SharedDrafts(DraftCounts):
    """Another total in every step, and other weights."""

    def __init__(self, most: int) -> None:
        self._most, self._step = most, 0

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        self._step += 1
        weights = {one.id: (1 << WEIGHT_BITS) * (1 + (one.id + self._step) % 3) // 2 for one in requests}
        total = self._step % (1 + len(requests) * self._most)
        wanted = [self._most if one.yields_tokens and total else 0 for one in requests]
        return DraftPlan(wanted, self._most, SharingPlan(total, weights, TABLE, wanted) if total else None)


@pytest.mark.parametrize(("family", "drafter", "stands_in"), [
    ("llama", "scripted", True), ("mamba2", "scripted", False), long("gated_delta", "scripted", True),
    long("kda", "scripted", False), long("gemma3", "scripted", True), long("deepseek_v32", "scripted", False),
    long("deepseek_v32", "mtp", False),
])
def test_tokens_are_those_without_drafts(family: str, drafter: str, stands_in: bool) -> None:
    rig, _ = run_captured(family, drafter, SharedDrafts(K), stands_in=stands_in, scripted=SureDrafter)
    shared = [(batch.drafting.sharing.total, [part.num_drafted for part in result.requests])
              for batch, result in zip(rig.batches, rig.results, strict=True) if batch.drafting.sharing is not None]
    assert all(sum(counts) <= total for total, counts in shared)
    assert sum(len(set(counts)) > 1 for _, counts in shared) > 3, "requests get different numbers"
    assert drafter == "mtp" or {part.num_accepted for result in rig.results for part in result.requests} == {0, 1, 2, 3}


def test_log_probabilities_are_those_of_the_runs() -> None:
    """The host does not know which logit rows a request has until the result says it."""
    if not native.available():
        pytest.skip(native.reason())
    model = tiny_model("llama", torch.float32)  # which code of the CPU samples with all parameters
    asks = [Ask(ask.prompt, SamplingParams(temperature=0, max_tokens=12, logprobs=index % 3 if index != 1 else None))
            for index, ask in enumerate(ASKS)]
    found = []
    for has_drafts in (False, True):
        right = lines_of(asks, tokens_of(found[0])) if found else {}
        made = SureDrafter(K, script_with_errors(right, range(1, K + 2))) if has_drafts else None
        with Rig(model, drafter=made, **SETTINGS) as rig, sizes_apart(3):
            if has_drafts:
                choose_drafts(rig.scheduler, SharedDrafts(K))
                AsCaptured(rig, takes_parameters=True)
            found.append(rig.run(asks))
    plain, shared = ([[{token: round(own.logprob, 3) for token, own in entry.items()}
                       for entry in out.outputs[0].logprobs or []] for out in outputs] for outputs in found)
    for own, wanted in zip(shared, plain, strict=True):
        assert own == [pytest.approx(entry, abs=2e-3) for entry in wanted]
    assert any(plain)


def test_the_engine_checks_what_its_drafter_is_sure_of() -> None:
    """The scheduler's own choice, where token rows are dear: half of all drafts hold, and the drafter says which."""
    model, asks = model_of("llama"), [Ask(prompt_of(i, 4 + i % 3, 24), greedy(60)) for i in range(12)]
    wanted = plain_tokens(model, asks, **MANY)
    lines = lines_of(asks, wanted)
    source = random.Random(0)
    wrong = {prompt: [(token + 1) % 24 if source.random() < 0.5 else token for token in run]
             for prompt, run in lines.items()}
    is_right = {prompt: [int(token == own) for token, own in zip(run, wrong[prompt], strict=True)]
                for prompt, run in lines.items()}

    class Honest(ScriptedDrafter):
        def propose(self, step: Step) -> Drafts:
            drafts = super().propose(step)
            rows, places = step.batch.padded.rows, torch.arange(drafts.tokens.shape[1])
            at = (step.known[rows][:, None] + places).clamp_max(self._right.shape[1] - 1)
            levels = 1 + self._right[rows[:, None], at] * (TOP_LEVEL - 1)
            return Drafts(drafts.tokens, drafts.counts, (levels << LEVEL_BITS * places).sum(dim=1))

        def admit(self, admissions: list[Any]) -> None:
            super().admit(admissions)
            self._right = getattr(self, "_right", torch.zeros_like(self._lines))
            for one in admissions:
                line = is_right[tuple(one.token_ids[: one.prompt_len])]
                self._right[one.row, one.prompt_len : one.prompt_len + len(line)] = torch.tensor(line)

    with Rig(model, drafter=Honest(K, lambda prompt, index: wrong[prompt]), **MANY) as rig:
        choose_drafts(rig.scheduler, SizedDrafts(K, StepCosts((1, 12, 48), (1.0, 1.05, 2.0), is_padded=True)))
        AsCaptured(rig)
        assert tokens_of(rig.run(asks)) == wanted
    shared = [result for batch, result in zip(rig.batches, rig.results, strict=True)
              if batch.drafting.sharing is not None]
    drafted, accepted = (sum(getattr(part, name) for result in shared for part in result.requests)
                         for name in ("num_drafted", "num_accepted"))
    assert len(shared) > 5 and accepted > 0.75 * drafted
