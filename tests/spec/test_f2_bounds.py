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
from outrider.mixers.batch import BatchView, KeysFrom
from tests.engine.harness import Ask, greedy, prompt_of, tiny_model
from tests.spec.checkpoints import make_drafter
from tests.spec.rig import DraftRig

K, MAX_LEN = 4, 64
# One request runs into max_len, so that bounds are cut there and equal it truly.
ASKS = [
    Ask(prompt_of(1, 21), greedy(8)),
    Ask(prompt_of(2, 50), greedy(None)),
    Ask(prompt_of(3, 3), greedy(12, speculative=1)),
]


class Recorder:
    """The views that `plan` was given, step by step, and the batch bounds of each step."""

    def __init__(self, rig: DraftRig) -> None:
        self.passes: list[list[tuple[bool, int, int, Group, int]]] = []
        self._plan = rig.step.backend.plan
        self._run = rig.step.run
        rig.step.backend.plan = self.plan  # type: ignore[method-assign]
        rig.step.run = self.run  # type: ignore[method-assign]

    def run(self, *args: Any, **options: Any) -> Any:
        self.passes.append([])
        return self._run(*args, **options)

    def plan(self, view: BatchView, group: Group) -> Any:
        is_drafting = isinstance(view.visible, KeysFrom)
        columns = view.page_table(group).shape[1]
        longest = int(view.lengths.max())
        self.passes[-1].append((is_drafting, view.max_length.tokens, columns, group, longest))
        return self._plan(view, group)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "draft_model"])
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
            fills = any(kind == "draft_model" or admission.computed for admission in batch.admissions)
            ahead = [1] * fills + list(range(1, batch.num_wanted + 1))
            expected = [min(bound + s, MAX_LEN) for s in ahead for _ in range(num_drafter_groups)]
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
