"""A small trained target with its EAGLE-3 head (tests/assets): the head works, and these tests can tell if it does not.

Random heads are checked token by token elsewhere; here acceptance itself is, on prompts that neither has seen, together
with three ways to break a head that leave the text untouched. float64, so that equal drafts means equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.drafters.autoregressive import AutoregressiveDrafter
from tests.assets.train_eagle3 import language
from tests.drafters.trained_heads import (
    TrainedHead,
    drafts_of,
    foreign_table,
    late_position,
    mean_run,
    shuffled_hidden,
)
from tests.engine.harness import Ask, Rig, greedy, tokens_of

ASSETS = Path(__file__).parents[1] / "assets"
K, LENGTH = 4, 32
EAGLE3 = {"method": "eagle3", "model": str(ASSETS / "eagle3"), "num_speculative_tokens": K, "auto": False}
SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 96, "num_pages": 128}
FLOOR = 2.5


def make_prompts() -> list[list[int]]:
    """Prompts of the language, from a seed that training did not use; every third starts in the middle of a page."""
    texts = language().texts(16, 40, torch.Generator().manual_seed(1234)).tolist()
    return [text[: 40 if i % 3 else 24] for i, text in enumerate(texts)]


HEAD = TrainedHead(ASSETS / "target", make_prompts, EAGLE3, LENGTH, FLOOR, SETTINGS)


def test_the_target_speaks_the_language() -> None:
    """Else a head would be easy to fool: the greedy text follows the mode's permutation nearly everywhere."""
    texts = [(prompt, prompt + continued) for prompt, (continued,) in zip(HEAD.prompts, HEAD.plain(), strict=True)]
    shares = [language().share_right(text, len(prompt), mode=text[0]) for prompt, text in texts]
    assert sum(shares) / len(shares) > 0.95


def test_mean_run_and_the_ngram_drafter_on_the_same_prompts() -> None:
    HEAD.check_floor_and_ngram()


def test_mean_run_at_temperature_one_with_the_targets_own_noise() -> None:
    HEAD.check_sampled()


def test_equal_drafts_alone_after_a_hit_and_after_a_preemption() -> None:
    run, drafts = HEAD.healthy
    with HEAD.draft_rig() as rig:
        alone = rig.run_one_by_one(HEAD.asks())
        assert drafts_of(rig) == drafts and mean_run(alone) == run
        hit = rig.run(HEAD.asks())
        assert all(output.metrics.num_cached_tokens >= 16 for output in hit)
        assert drafts_of(rig) == drafts and mean_run(hit) == run
        preempted = rig.run(HEAD.asks(), after_step=rig.preempt)
        assert all(output.metrics.num_preemptions == 1 for output in preempted)
        # A resumed request waits for its first drafts, so that its runs fall elsewhere. Requests that use no drafts
        # stop at every length, and there it is proposed for them all the same.
        resumed = drafts_of(rig)
        rig.run(HEAD.asks(greedy(LENGTH, speculative=False)))
        everywhere = drafts_of(rig)
        assert len(everywhere) == 16 * (LENGTH - 1)
        assert drafts.items() <= everywhere.items() and resumed.items() <= everywhere.items()
        assert mean_run(preempted) > run - 0.5
        assert tokens_of(alone) == tokens_of(hit) == tokens_of(preempted) == HEAD.plain()


@pytest.mark.parametrize("harm", [shuffled_hidden, foreign_table, late_position], ids=lambda harm: harm.__name__)
def test_a_broken_head_shows_in_the_mean_run_only(harm: Callable[[AutoregressiveDrafter], None]) -> None:
    HEAD.check_harmed(harm)


@pytest.mark.parametrize("params", [greedy(LENGTH), HEAD.sampled()], ids=["greedy", "sampled"])
def test_exact_with_chunks_padding_overlap_and_a_small_pool(params: SamplingParams) -> None:
    """Short prompts that all fit at first and then outgrow the pool."""
    short = [Ask(prompt[:12], params) for prompt in HEAD.prompts[:8]]
    with Rig(HEAD.target, **SETTINGS) as rig:
        expected = tokens_of(rig.run(short))
    with Rig(HEAD.target, speculative_config=EAGLE3, overlap=True, max_num_seqs=4, max_num_batched_tokens=27,
             num_pages=9, max_model_len=64, pad_requests=(3, 6), pad_tokens=(10, 30)) as rig:
        outputs = rig.run(short)
        assert tokens_of(outputs) == expected
        stats = rig.scheduler.stats
        assert stats.num_preemptions > 0 and stats.max_steps_in_flight == 2 and rig.runner.num_padded_steps > 0
        assert any(not all(batch.samples) for batch in rig.batches), "prompts cut into chunks"
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
