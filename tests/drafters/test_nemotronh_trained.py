"""A small trained NemotronH with its MTP module (tests/assets): the module works, and these tests can tell if it does
not.

Its hidden states come out of recurrent layers, so that a hit or a preemption goes through a checkpoint. float64, so
that equal drafts means equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.drafters.autoregressive import AutoregressiveDrafter
from tests.assets.train_nemotronh import language, texts
from tests.drafters.rig import DraftRig
from tests.drafters.trained_heads import (
    Drafts,
    TrainedHead,
    drafts_of,
    foreign_table,
    late_position,
    late_tokens,
    mean_run,
    shuffled_hidden,
)
from tests.engine.harness import Ask, Rig, greedy, tokens_of

FOLDER = Path(__file__).parents[1] / "assets" / "nemotronh"
K, LENGTH, FLOOR = 3, 32, 2.2
MTP = {"method": "mtp", "model": str(FOLDER), "num_speculative_tokens": K, "auto": False}
SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 96, "num_pages": 400,
                            "checkpoint_interval": 32}


def make_prompts() -> list[list[int]]:
    """From a seed that training did not use, neighbours in different modes; every third ends within a page."""
    drawn = texts(80, 40, torch.Generator().manual_seed(1234)).tolist()
    chosen = [drawn.pop(next(i for i, text in enumerate(drawn) if text[1] == mode)) for mode in [0, 1, 2, 3] * 4]
    return [text[: 40 if i % 3 else 24] for i, text in enumerate(chosen)]


HEAD = TrainedHead(FOLDER, make_prompts, MTP, LENGTH, FLOOR, SETTINGS)


@cache
def everywhere() -> Drafts:
    """Requests that use no drafts stop at every length, and there it is proposed for them all the same."""
    with HEAD.draft_rig() as rig:
        rig.run(HEAD.asks(greedy(LENGTH, speculative=False)))
        drafts = drafts_of(rig)
        assert len(drafts) == 16 * (LENGTH - 1)
        return drafts


def test_the_target_speaks_the_language() -> None:
    """Else a module would be easy to fool: the greedy text follows the mode's permutation nearly everywhere."""
    shares = [language().share_right(prompt + continued, len(prompt), mode=prompt[1])
              for prompt, (continued,) in zip(HEAD.prompts, HEAD.plain(), strict=True)]
    assert sum(shares) / len(shares) > 0.95


def test_mean_run_and_the_ngram_drafter_on_the_same_prompts() -> None:
    HEAD.check_floor_and_ngram()
    assert HEAD.healthy[1].items() <= everywhere().items()


def test_mean_run_at_temperature_one_with_the_targets_own_noise() -> None:
    HEAD.check_sampled()


def test_equal_drafts_alone_after_a_hit_and_after_a_preemption() -> None:
    run, drafts = HEAD.healthy
    with HEAD.draft_rig() as rig:
        states = rig.scheduler.cache.states
        alone = rig.run_one_by_one(HEAD.asks())
        assert drafts_of(rig) == drafts and mean_run(alone) == run and states.num_restored == 0
        hit = rig.run(HEAD.asks())
        assert all(output.metrics.num_cached_tokens >= 16 for output in hit) and states.num_restored == 16
        assert drafts_of(rig) == drafts and mean_run(hit) == run
        preempted = rig.run(HEAD.asks(), after_step=rig.preempt)
        assert all(output.metrics.num_preemptions == 1 for output in preempted) and states.num_restored == 48
        # A resumed request waits for its first drafts, so that its runs fall elsewhere.
        assert drafts_of(rig).items() <= everywhere().items()
        assert mean_run(preempted) > run - 0.5
        assert tokens_of(alone) == tokens_of(hit) == tokens_of(preempted) == HEAD.plain()


@pytest.mark.parametrize("harm", [shuffled_hidden, foreign_table, late_tokens], ids=lambda harm: harm.__name__)
def test_a_broken_module_shows_in_the_mean_run_only(harm: Callable[[AutoregressiveDrafter], None]) -> None:
    HEAD.check_harmed(harm)


def test_the_module_knows_no_positions() -> None:
    """So a rope position off by two, which ruins other heads, must leave every draft as it is."""
    with HEAD.draft_rig() as rig:
        assert isinstance(rig.step.drafter, AutoregressiveDrafter)
        late_position(rig.step.drafter)
        rig.run(HEAD.asks())
        assert drafts_of(rig) == HEAD.healthy[1]


@pytest.mark.parametrize("params", [greedy(LENGTH), HEAD.sampled()], ids=["greedy", "sampled"])
def test_exact_with_chunks_padding_overlap_and_a_small_pool(params: SamplingParams) -> None:
    """Short prompts that all fit at first and then outgrow the pool; checkpoints give way."""
    short = [Ask(prompt[:12], params) for prompt in HEAD.prompts[:8]]
    with Rig(HEAD.target, **SETTINGS) as rig:
        expected = tokens_of(rig.run(short))
    tight = SETTINGS | {"max_num_seqs": 4, "max_num_batched_tokens": 27, "num_pages": 9, "max_model_len": 64}
    with DraftRig(HEAD.target, speculative_config=MTP, overlap=True, pad_requests=(3, 6), pad_tokens=(10, 30),
                  **tight) as rig:
        outputs = rig.run(short)
        assert tokens_of(outputs) == expected
        stats = rig.scheduler.stats
        assert stats.num_preemptions > 0 and stats.max_steps_in_flight == 2 and rig.runner.num_padded_steps > 0
        assert rig.scheduler.cache.pool.num_evicted > 0
        assert any(not all(batch.samples) for batch in rig.batches), "prompts cut into chunks"
        accepted = {part.num_accepted for result in rig.results for part in result.requests}
        assert accepted == set(range(K + 1))
