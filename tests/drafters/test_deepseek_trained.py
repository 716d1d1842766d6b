"""A small trained DeepSeek-V3.2 with its MTP module (tests/assets): the module works, and these tests can tell if it
does not.

Contexts are two to three times longer than the indexers' top-k, so target and module only see what they choose.
float64, so that equal drafts means equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.mixers.latent.latent_mixer import BoundLatentLayer
from outrider.models.loader import fill_model
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from tests.assets.train_deepseek_v32 import INDEX_DIM, KV_RANK, LAYERS, ROPE, TOP_K, language
from tests.drafters.trained_heads import (
    HARM,
    TrainedHead,
    drafts_of,
    foreign_table,
    late_position,
    mean_run,
    shuffled_hidden,
)
from tests.engine.harness import Rig, greedy, tokens_of

FOLDER = Path(__file__).parents[1] / "assets" / "deepseek_v32"
K, LENGTH, FLOOR = 3, 16, 2.2
MTP = {"method": "mtp", "model": str(FOLDER), "num_speculative_tokens": K, "auto": False}
SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 48, "num_pages": 128}


def make_prompts() -> list[list[int]]:
    """From a seed that training did not use, neighbours in different modes; every third ends within its second page."""
    drawn = language().texts(80, 24, torch.Generator().manual_seed(1234)).tolist()
    chosen = [drawn.pop(next(i for i, text in enumerate(drawn) if text[0] == mode)) for mode in [0, 1] * 8]
    return [text[: 24 if i % 3 else 20] for i, text in enumerate(chosen)]


HEAD = TrainedHead(FOLDER, make_prompts, MTP, LENGTH, FLOOR, SETTINGS)


def test_the_target_speaks_the_language() -> None:
    """Else a module would be easy to fool: the greedy text follows the mode's permutation nearly everywhere."""
    shares = [language().share_right(prompt + continued, len(prompt), mode=prompt[0])
              for prompt, (continued,) in zip(HEAD.prompts, HEAD.plain(), strict=True)]
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
        assert drafts_of(rig) == drafts and mean_run(hit) == run >= FLOOR
        preempted = rig.run(HEAD.asks(), after_step=rig.preempt)
        assert all(output.metrics.num_preemptions == 1 for output in preempted)
        # A resumed request waits for its first drafts, so that its runs fall elsewhere. Requests that use no drafts
        # stop at every length, and there it is proposed for them all the same.
        resumed = drafts_of(rig)
        rig.run(HEAD.asks(greedy(LENGTH, speculative=False)))
        everywhere = drafts_of(rig)
        assert len(everywhere) == 16 * (LENGTH - 1)
        assert drafts.items() <= everywhere.items() and resumed.items() <= everywhere.items()
        assert mean_run(preempted) >= FLOOR
        assert min(bound for batch in rig.batches for bound in batch.bounds) > TOP_K
        assert tokens_of(alone) == tokens_of(hit) == tokens_of(preempted) == HEAD.plain()


@pytest.mark.parametrize("harm", [shuffled_hidden, foreign_table, late_position], ids=lambda harm: harm.__name__)
def test_a_broken_module_shows_in_the_mean_run_only(harm: Callable[[AutoregressiveDrafter], None]) -> None:
    HEAD.check_harmed(harm)


def test_index_keys_in_fp8_choose_as_well() -> None:
    """Keys lose most of their bits, and what matters is still chosen: nearly the same text, drafts as good."""
    source = resolve(FOLDER)
    rounded = build_model(source.config | {"index_key_dtype": "fp8"}, dtype=torch.float64, device="cpu")
    fill_model(rounded, source)
    with Rig(rounded, speculative_config=MTP, **SETTINGS) as rig:
        outputs = rig.run(HEAD.asks())
        (group,) = rig.step.pool.layout.groups
        assert group.spec.token_bytes == 8 * (KV_RANK + ROPE) + INDEX_DIM + 4
    with Rig(rounded, **SETTINGS) as rig:
        assert tokens_of(rig.run(HEAD.asks())) == tokens_of(outputs)
    assert mean_run(outputs) >= FLOOR
    same = [ours == theirs for ours, theirs in zip(tokens_of(outputs), HEAD.plain(), strict=True)]
    assert sum(same) >= 12


@pytest.mark.parametrize("worst_in", ["module", "target"])
def test_the_positions_that_an_indexer_chooses_matter(worst_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing by negated weights harms the drafts if the module does it, and the text if the target does."""
    run, right, choose = HEAD.healthy[0], HEAD.plain(), BoundLatentLayer.choose

    def worst(bound: BoundLatentLayer, q: torch.Tensor, weights: torch.Tensor) -> None:
        is_module = bound.layer.index >= LAYERS
        choose(bound, q, -weights if is_module == (worst_in == "module") else weights)

    monkeypatch.setattr(BoundLatentLayer, "choose", worst)
    with HEAD.rig() as rig:
        outputs = rig.run(HEAD.asks())
    assert (tokens_of(outputs) == right) == (worst_in == "module")
    assert worst_in == "target" or mean_run(outputs) <= run - HARM
