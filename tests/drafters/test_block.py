"""Block drafters: drafts in ragged, padded, paged batches equal those of a naive reference, and the text of whole engines
is that of engines without drafts. In float64; every case asserts from counters that its condition occurred."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.core.params import SamplingParams
from outrider.models.base import Model
from tests.covering import grid
from tests.drafters.blocks import FORMS, BlockReference, make_block
from tests.drafters.checkpoints import Drafter
from tests.drafters.hybrid_rig import hybrid_of
from tests.drafters.rig import DraftRig, Proposal
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(10)),
    Ask([*SHARED, *prompt_of(2, 3)], SamplingParams(temperature=1.0, seed=7, max_tokens=8)),
    Ask([*SHARED[:16], *prompt_of(3, 25)], greedy(7, speculative=2)),
    Ask(prompt_of(4, 1), greedy(13)),
    Ask([*SHARED, *prompt_of(5, 6)], greedy(6, speculative=False)),
    Ask(prompt_of(6, 18), greedy(9, speculative=4)),
]
MakeDrafter = Callable[[str, str], Drafter]
CELLS = grid([(form, family) for form in FORMS for family in ("llama", "gemma3")], strength=1)


def target_of(family: str) -> Model:
    return hybrid_of(family) if family in ("nemotron_h", "qwen3_next") else tiny_model(family)


@pytest.fixture(scope="module")
def drafter_of(tmp_path_factory: pytest.TempPathFactory) -> MakeDrafter:
    root: Path = tmp_path_factory.mktemp("blocks")
    head_dim = {"llama": 8, "gemma3": 16}
    return cache(lambda form, family: make_block(form, target_of(family), root / f"{form}-{family}",
                                                 head_dim.get(family, 8)))


def assert_as_reference(proposals: list[Proposal], asks: list[Ask], drafter: Drafter, target: Model, k: int,
                        max_len: int, valid_from: Callable[[Proposal], int] = lambda proposal: 0) -> None:
    reference = BlockReference(drafter, target)
    params = {tuple(ask.prompt): ask.params for ask in asks}
    expected: dict[tuple[Any, ...], list[int]] = {}
    for proposal in proposals:
        own = next(p for prompt, p in params.items() if proposal.known[: len(prompt)] == prompt)
        rows = min(k + reference.first_row, max_len - len(proposal.known) + 1)
        key = (proposal.known, len(proposal.drafts), valid_from(proposal))
        if key not in expected:
            expected[key] = reference.drafts(proposal.known, key[1], own, key[2], rows)
        assert list(proposal.drafts) == expected[key], f"after {len(proposal.known)} tokens, valid from {key[2]}"


@pytest.mark.parametrize(("form", "family"), CELLS)
def test_ragged_padded_batches_with_hits_and_preemptions(form: str, family: str, drafter_of: MakeDrafter) -> None:
    """Prompts cut into chunks beside rows that decode, fewer drafts or none, padding that is partly filled, results
    two steps late, everyone preempted once with steps in flight."""
    drafter, target = drafter_of(form, family), target_of(family)
    with DraftRig(target, speculative_config=drafter.speculative(5), max_num_seqs=4, overlap=True, num_pages=128,
                  max_num_batched_tokens=23, max_model_len=64, pad_requests=(3, 8), pad_tokens=(6, 30)) as rig:
        rig.run(ASKS)
        late = rig.run(ASKS, after_step=rig.preempt)  # the second time with hits for everyone
        stats = rig.scheduler.stats
        assert stats.max_steps_in_flight == 2 and rig.runner.num_padded_steps > 0
        assert stats.num_preemptions == len(ASKS) and stats.num_dropped_results > 0
        assert any(output.metrics.num_cached_tokens >= 32 for output in late)
        assert any(not all(batch.samples) and any(batch.num_drafts) for batch in rig.batches), "chunks beside drafts"
        assert {len(p.drafts) for p in rig.proposals} == {5}
        assert_as_reference(rig.proposals, ASKS, drafter, target, 5, 64)
