"""F2: the bound that backends are given is the batch's own, in the target's pass and in every drafting pass.

The failure was a longest length of max_model_len handed to the kernels of hybrid models and of the EAGLE speculator:
reads past the valid columns of the page table, and wasted work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cache.groups import Group
from outrider.cache.kinds import pages_for
from outrider.core import ScheduledBatch
from outrider.mixers.batch import BatchView, KeysFrom
from outrider.mixers.latent import latent_mixer as latent_base
from tests.drafters.checkpoints import make_drafter
from tests.drafters.hybrid_rig import VOCAB as SMALL_VOCAB
from tests.drafters.hybrid_rig import hybrid_of, mtp_of
from tests.drafters.latent_rig import latent_of
from tests.drafters.rig import DraftRig
from tests.drafters.trained import SPECULATIVE, trained_prompts, trained_target
from tests.engine.harness import Ask, greedy, prompt_of, tiny_model

K, MAX_LEN = 4, 64
# One request runs into max_len, so that bounds are cut there and equal it truly.
ASKS = [
    Ask(prompt_of(1, 21), greedy(8)),
    Ask(prompt_of(2, 50), greedy(None)),
    Ask(prompt_of(3, 3), greedy(12, speculative=1)),
]


class Recorder:
    """What the plans of paged and of latent layers were made for, step by step."""

    def __init__(self, rig: DraftRig, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        """monkeypatch: where the model has latent layers, whose plans no backend makes."""
        self.passes: list[list[tuple[bool, int, int, Group, int]]] = []
        self._plan, self._plan_latents = rig.step.backend.plan, latent_base.plan_group
        self._begin = rig.step.apply_host_writes
        self._is_proposing = False
        rig.step.backend.plan = self.plan  # type: ignore[method-assign]
        rig.step.apply_host_writes = self.begin  # type: ignore[method-assign]
        assert rig.step.drafter is not None
        self._propose, rig.step.drafter.propose = rig.step.drafter.propose, self.propose  # type: ignore[method-assign]
        if monkeypatch is not None:
            monkeypatch.setattr(latent_base, "plan_group", self.plan_latents)

    def begin(self, batch: ScheduledBatch) -> None:
        self.passes.append([])
        self._begin(batch)

    def propose(self, step: Any) -> Any:
        self._is_proposing = True
        try:
            return self._propose(step)
        finally:
            self._is_proposing = False

    def plan(self, view: BatchView, group: Group) -> Any:
        self._note(view, group, view.max_length.tokens, view.page_table(group).shape[1])
        return self._plan(view, group)

    def plan_latents(self, view: BatchView, group: Group) -> Any:
        plan = self._plan_latents(view, group)
        self._note(view, group, plan.num_positions, plan.contexts.page_table.shape[1])
        return plan

    def _note(self, view: BatchView, group: Group, tokens: int, columns: int) -> None:
        is_drafting = self._is_proposing or isinstance(view.visible, KeysFrom)
        self.passes[-1].append((is_drafting, tokens, columns, group, int(view.lengths.max())))


PAIRS = [("eagle", "gemma3"), ("eagle3", "llama"), ("mtp", "gemma3"), ("draft_model", "llama")]
OTHER_PAIRS = [("eagle", "llama"), ("eagle3", "gemma3"), ("mtp", "llama"), ("draft_model", "gemma3")]


@pytest.mark.parametrize(("kind", "family"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.long)
                                                        for pair in OTHER_PAIRS)])
def test_f2_every_pass_has_the_bound_of_its_own_batch(kind: str, family: str, tmp_path: Path) -> None:
    drafter = make_drafter(kind, family, tmp_path)
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(K), max_model_len=MAX_LEN,
                  max_num_batched_tokens=40, pad_requests=(4,), pad_tokens=(48,)) as rig:
        recorder = Recorder(rig)
        rig.run(ASKS)
        assert len(recorder.passes) == len(rig.batches)
        target_groups = {place.group for layer, (place,) in rig.step.pool.layout.places.items()
                         if layer < rig.step.model.num_layers}
        assert rig.step.drafter is not None
        num_drafter_groups = len({rig.step.pool.layout.places[layer.index][0].group
                                  for layer in rig.step.drafter.attention_layers})
        for batch, passes in zip(rig.batches, recorder.passes, strict=True):
            bound = max(batch.bounds)
            assert [tokens for drafts, tokens, *_ in passes if not drafts] == [bound] * len(target_groups)
            # Rows just admitted have one slot to fill first, if not a head's without a hit; then the step's tokens, and
            # one pass per further draft.
            filled = [a.computed + 1 for a in batch.admissions if kind == "draft_model" or a.computed]
            bounds = [max(filled)] if filled and batch.drafting.num_wanted else []
            bounds += [min(bound + ahead, MAX_LEN) for ahead in range(1, batch.drafting.num_wanted + 1)]
            expected = [own for own in bounds for _ in range(num_drafter_groups)]
            assert [tokens for drafts, tokens, *_ in passes if drafts] == expected
        bounds = [max(batch.bounds) for batch in rig.batches]
        assert min(bounds) < MAX_LEN // 2 and max(bounds) + K > MAX_LEN, "far from the longest length, and cut by it"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_f2_tables_are_as_wide_as_the_bound_and_no_context_is_longer(family: str, tmp_path: Path) -> None:
    drafter = make_drafter("eagle3", family, tmp_path)
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(K), max_model_len=MAX_LEN) as rig:
        recorder = Recorder(rig)
        rig.run_one_by_one(ASKS)
        widths = set()
        for _, tokens, columns, group, longest in (entry for passes in recorder.passes for entry in passes):
            assert longest <= tokens <= MAX_LEN
            assert columns == pages_for(tokens, group.page_tokens)
            widths.add(columns)
        assert len(widths) > 2


def test_f2_a_short_batch_after_a_long_one_is_bounded_by_itself(tmp_path: Path) -> None:
    drafter = make_drafter("eagle3", "llama", tmp_path)
    with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(K), max_model_len=MAX_LEN) as rig:
        rig.run([ASKS[1]])
        recorder = Recorder(rig)
        rig.run([Ask(prompt_of(5, 4), greedy(4))])
        assert max(tokens for passes in recorder.passes for _, tokens, *_ in passes) <= 4 + 4 + K


def rig_of(model: str) -> DraftRig:
    """A recurrent hybrid or a model of latent attention with its multi-token-prediction module, or the small Gemma 4
    with its assistant."""
    settings: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 40, "pad_requests": (4,),
                                "pad_tokens": (48,)}
    if model == "gemma4_assistant":
        return DraftRig(trained_target(), speculative_config=SPECULATIVE, num_pages=300, **settings)
    target = hybrid_of(model) if model in ("nemotron_h", "qwen3_5") else latent_of(model)
    return DraftRig(target, drafter=mtp_of(target, K), **settings)


MODELS = ["nemotron_h", "deepseek_v32", "gemma4_assistant"]
OTHER_MODELS = ["qwen3_5", "deepseek_v3"]


@pytest.mark.parametrize("model", [*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in OTHER_MODELS)])
def test_f2_hybrids_latent_layers_and_the_assistant_are_bounded_by_the_batch(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assistant reads the step's own contexts; a module's slots go one further with every pass."""
    with rig_of(model) as rig:
        recorder = Recorder(rig, monkeypatch)
        prompts = (trained_prompts(1, (21, 50, 3)) if model == "gemma4_assistant" else
                   [prompt_of(seed, length, SMALL_VOCAB) for seed, length in ((1, 21), (2, 50), (3, 3))])
        rig.run([Ask(prompt, ask.params) for prompt, ask in zip(prompts, ASKS, strict=True)])
        assert len(recorder.passes) == len(rig.batches)
        num_ahead: set[int] = set()
        for batch, passes in zip(rig.batches, recorder.passes, strict=True):
            bound = max(batch.bounds)
            assert {tokens for drafts, tokens, *_ in passes if not drafts} == {bound}
            ahead = range(1) if model == "gemma4_assistant" else range(1, max(1, batch.drafting.num_wanted) + 1)
            found = {tokens for drafts, tokens, *_ in passes if drafts}
            assert found <= {min(bound + s, MAX_LEN) for s in ahead}
            num_ahead |= {tokens - bound for tokens in found}
            for _, tokens, columns, group, longest in passes:
                assert longest <= tokens and columns == pages_for(tokens, group.page_tokens)
        assert num_ahead == {0} if model == "gemma4_assistant" else {1, K} <= num_ahead
        bounds = [max(batch.bounds) for batch in rig.batches]
        assert min(bounds) < MAX_LEN // 2 and max(bounds) + K > MAX_LEN, "far from the longest length, and cut by it"
