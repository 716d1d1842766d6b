"""A small trained DeepSeek-V3.2 with its MTP module (tests/assets): the module works, and these tests can tell if it
does not.

Contexts are two to three times longer than the indexers' top-k, so target and module only see what they choose.
float64, so that equal drafts means equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.mixers.latent.base import BoundLatentLayer
from outrider.models.base import Model
from outrider.models.loader import fill_model, load_model
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.spec.autoregressive import AutoregressiveDrafter
from tests.assets.train_deepseek_v32 import INDEX_DIM, KV_RANK, LAYERS, ROPE, TOP_K, language
from tests.engine.harness import Ask, Rig, greedy, tokens_of
from tests.spec.rig import DraftRig
from tests.spec.trained_heads import (
    HARM,
    NGRAM_CEILING,
    Drafts,
    drafts_of,
    foreign_table,
    late_position,
    mean_run,
    shuffled_hidden,
)

FOLDER = Path(__file__).parents[1] / "assets" / "deepseek_v32"
K, LENGTH, FLOOR = 3, 16, 2.2
MTP = {"method": "mtp", "model": str(FOLDER), "num_speculative_tokens": K, "auto": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "auto": False}
SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 48, "num_pages": 128}


@cache
def target() -> Model:
    return load_model(resolve(FOLDER), dtype=torch.float64, device="cpu")


@cache
def prompts() -> list[list[int]]:
    """From a seed that training did not use, neighbours in different modes; every third ends within its second page."""
    drawn = language().texts(80, 24, torch.Generator().manual_seed(1234)).tolist()
    chosen = [drawn.pop(next(i for i, text in enumerate(drawn) if text[0] == mode)) for mode in [0, 1] * 8]
    return [text[: 24 if i % 3 else 20] for i, text in enumerate(chosen)]


def asks(params: SamplingParams | None = None) -> list[Ask]:
    return [Ask(prompt, params or greedy(LENGTH)) for prompt in prompts()]


def sampled() -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=11, max_tokens=LENGTH)


@cache
def plain(params: SamplingParams | None = None) -> list[list[list[int]]]:
    with Rig(target(), **SETTINGS) as rig:
        return tokens_of(rig.run(asks(params)))


@cache
def healthy() -> tuple[float, Drafts]:
    """Mean run and drafts of the module as it is, in a batch of 16."""
    with DraftRig(target(), speculative_config=MTP, **SETTINGS) as rig:
        outputs = rig.run(asks())
        assert max(batch.num_requests for batch in rig.batches) == 16
        assert min(bound for batch in rig.batches for bound in batch.bounds) > TOP_K
        assert tokens_of(outputs) == plain()
        return mean_run(outputs), drafts_of(rig)


def test_the_target_speaks_the_language() -> None:
    """Else a module would be easy to fool: the greedy text follows the mode's permutation nearly everywhere."""
    shares = [language().share_right(prompt + continued, len(prompt), mode=prompt[0])
              for prompt, (continued,) in zip(prompts(), plain(), strict=True)]  # fmt: skip
    assert sum(shares) / len(shares) > 0.95


def test_mean_run_and_the_ngram_drafter_on_the_same_prompts() -> None:
    assert healthy()[0] >= FLOOR
    with Rig(target(), speculative_config=NGRAM, **SETTINGS) as rig:
        outputs = rig.run(asks())
        assert tokens_of(outputs) == plain()
        assert mean_run(outputs) < NGRAM_CEILING


def test_mean_run_at_temperature_one_with_the_targets_own_noise() -> None:
    with Rig(target(), speculative_config=MTP, **SETTINGS) as rig:
        outputs = rig.run(asks(sampled()))
        assert tokens_of(outputs) == plain(sampled()) != plain()
        assert mean_run(outputs) >= FLOOR


def test_equal_drafts_alone_after_a_hit_and_after_a_preemption() -> None:
    run, drafts = healthy()
    with DraftRig(target(), speculative_config=MTP, **SETTINGS) as rig:
        alone = rig.run_one_by_one(asks())
        assert drafts_of(rig) == drafts and mean_run(alone) == run
        hit = rig.run(asks())
        assert all(output.metrics.num_cached_tokens >= 16 for output in hit)
        assert drafts_of(rig) == drafts and mean_run(hit) == run >= FLOOR
        preempted = rig.run(asks(), after_step=rig.preempt)
        assert all(output.metrics.num_preemptions == 1 for output in preempted)
        # A resumed request waits for its first drafts, so that its runs fall elsewhere. Requests that use no drafts
        # stop at every length, and there it is proposed for them all the same.
        resumed = drafts_of(rig)
        rig.run(asks(greedy(LENGTH, speculative=False)))
        everywhere = drafts_of(rig)
        assert len(everywhere) == 16 * (LENGTH - 1)
        assert drafts.items() <= everywhere.items() and resumed.items() <= everywhere.items()
        assert mean_run(preempted) >= FLOOR
        assert tokens_of(alone) == tokens_of(hit) == tokens_of(preempted) == plain()


@pytest.mark.parametrize("harm", [shuffled_hidden, foreign_table, late_position], ids=lambda harm: harm.__name__)
def test_a_broken_module_shows_in_the_mean_run_only(harm: Callable[[AutoregressiveDrafter], None]) -> None:
    # Unseen tails of foreign pages are not poisoned: the harm is to be in what is read, not in NaN.
    with Rig(target(), speculative_config=MTP, poison=False, **SETTINGS) as rig:
        assert isinstance(rig.step.drafter, AutoregressiveDrafter)
        harm(rig.step.drafter)
        outputs = rig.run(asks())
        assert tokens_of(outputs) == plain()
        assert mean_run(outputs) <= healthy()[0] - HARM


def test_index_keys_in_fp8_choose_as_well() -> None:
    """Keys lose most of their bits, and what matters is still chosen: nearly the same text, drafts as good."""
    source = resolve(FOLDER)
    rounded = build_model(source.config | {"index_key_dtype": "fp8"}, dtype=torch.float64, device="cpu")
    fill_model(rounded, source)
    with Rig(rounded, speculative_config=MTP, **SETTINGS) as rig:
        outputs = rig.run(asks())
        (group,) = rig.step.pool.layout.groups
        assert group.spec.token_bytes == 8 * (KV_RANK + ROPE) + INDEX_DIM + 4
    with Rig(rounded, **SETTINGS) as rig:
        assert tokens_of(rig.run(asks())) == tokens_of(outputs)
    assert mean_run(outputs) >= FLOOR
    same = [ours == theirs for ours, theirs in zip(tokens_of(outputs), plain(), strict=True)]
    assert sum(same) >= 12


@pytest.mark.parametrize("worst_in", ["module", "target"])
def test_the_positions_that_an_indexer_chooses_matter(worst_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing by negated weights harms the drafts if the module does it, and the text if the target does."""
    run, right, choose = healthy()[0], plain(), BoundLatentLayer.choose

    def worst(bound: BoundLatentLayer, q: torch.Tensor, weights: torch.Tensor) -> None:
        is_module = bound.layer.index >= LAYERS
        choose(bound, q, -weights if is_module == (worst_in == "module") else weights)

    monkeypatch.setattr(BoundLatentLayer, "choose", worst)
    with Rig(target(), speculative_config=MTP, **SETTINGS) as rig:
        outputs = rig.run(asks())
    assert (tokens_of(outputs) == right) == (worst_in == "module")
    assert worst_in == "target" or mean_run(outputs) <= run - HARM
