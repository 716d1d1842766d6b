"""The exactness matrix without drafters: the same tokens whatever the chunks, hits, overlap, padding, preemptions
and batch mates. In float64, where the order of arithmetic cannot flip a choice: any difference is a bug.

Every cell asserts from counters that its condition occurred.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest

from outrider.core.params import SamplingParams
from tests.covering import grid
from tests.engine.harness import CONFIGS, Ask, Rig, greedy, prompt_of, tiny_model, tokens_alone, tokens_of
from tests.models import oracle

SHARED = prompt_of(0, 32)
LENGTH = 8
LOUD = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=80, min_p=0.001, repetition_penalty=1.2, presence_penalty=0.4,
    frequency_penalty=0.3, seed=13, max_tokens=LENGTH, min_tokens=4, stop_token_ids=list(range(3, 60)), ignore_eos=True,
    logit_bias={61: 2.0, 70: -5.0}, bad_words_token_ids=((77,), (61, 62)),
)
CHOOSY = SamplingParams(temperature=1.4, top_k=30, seed=6, max_tokens=LENGTH, allowed_token_ids=list(range(3, 256, 2)))
ASKS = [
    Ask([*SHARED, *prompt_of(1, 14)], greedy(LENGTH)),
    Ask([*SHARED, *prompt_of(2, 13)], SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH)),
    Ask([*SHARED[:16], *prompt_of(3, 14)], LOUD),
    Ask(prompt_of(4, 5), CHOOSY),
    Ask([*SHARED, *prompt_of(5, 15)], greedy(LENGTH, repetition_penalty=1.3, frequency_penalty=0.5)),
]
CHUNKS = (5, 17, 64)

class Cell(NamedTuple):
    chunk: int
    prefix: bool
    overlap: bool
    padded: bool
    preempted: bool
    alone: bool

    @property
    def settings(self) -> dict[str, Any]:
        padding = {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)} if self.padded else {}
        return {"max_num_batched_tokens": self.chunk, "enable_prefix_caching": self.prefix, "overlap": self.overlap,
                "max_num_seqs": 3, "max_model_len": 64, **padding}

    def __str__(self) -> str:
        names = [name for name in self._fields[1:] if getattr(self, name)]
        return "-".join([f"chunk{self.chunk}", *names])


# Every three of the conditions meet in a quick cell.
CELLS = grid(list(itertools.product(CONFIGS, CHUNKS, *[(False, True)] * 5)), strength=3,
             arguments=lambda family, *values: (family, Cell(*values)))


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return tokens_alone(tiny_model(family), ASKS)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_reference_is_the_models_own_choice(family: str) -> None:
    """Without pages, batches or engine; and the sampled requests differ from the greedy one, so they do sample."""
    assert expected(family)[0][0] == oracle.greedy(tiny_model(family), ASKS[0].prompt, LENGTH)
    assert len({tuple(tokens) for (tokens,) in expected(family)}) == len(ASKS)
    assert 4 < len(expected(family)[2][0]) < LENGTH, "the loud request should stop early, but not before min_tokens"


@pytest.mark.parametrize(("family", "cell"), CELLS)
def test_tokens_are_a_function_of_the_request(family: str, cell: Cell) -> None:
    with Rig(tiny_model(family), **cell.settings) as rig:
        preempt = rig.preempt if cell.preempted else None
        if cell.alone:
            outputs, wanted = rig.run_one_by_one(ASKS[:3], after_step=preempt), expected(family)[:3]
        else:
            outputs, wanted = rig.run(ASKS, after_step=preempt), expected(family)
        assert_occurred(rig, cell)
        assert tokens_of(outputs) == wanted


def assert_occurred(rig: Rig, cell: Cell) -> None:
    stats, cache = rig.scheduler.stats, rig.scheduler.cache.stats
    assert max(batch.num_tokens for batch in rig.batches) <= cell.chunk
    cut = any(not samples for batch in rig.batches for samples in batch.samples)
    assert cut if cell.chunk < 47 else not (cell.alone and cut), "prompts cut into chunks"
    assert (cache.hit_tokens > 0) == cell.prefix, "prefix hits"
    assert stats.max_steps_in_flight == (2 if cell.overlap else 1), "steps in flight"
    assert (rig.runner.num_padded_steps > 0) == cell.padded, "padded beyond scheduled"
    assert (stats.num_preemptions > 0) == cell.preempted, "preemptions"
    assert stats.num_dropped_results > 0 if cell.overlap else stats.num_dropped_results == 0, "stale results"
    assert (max(batch.num_requests for batch in rig.batches) == 1) == cell.alone, "batch mates"
    assert rig.num_poisoned > 0, "poisoned pages"


@pytest.mark.parametrize("prefix", [False, True], ids=["", "prefix"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("family", "num_pages"), [("llama", 5), ("sliding", 5), ("gemma3", 7)])
def test_a_pool_that_runs_short_changes_nothing(family: str, num_pages: int, overlap: bool, prefix: bool) -> None:
    """Here the scheduler preempts by itself: two requests start with two pages of each group, and both want more."""
    asks = [Ask(prompt_of(i, 20), SamplingParams(temperature=0.7, seed=i, max_tokens=24)) for i in range(3)]
    settings = {"max_model_len": 64, "max_num_seqs": 3, "overlap": overlap, "enable_prefix_caching": prefix}
    model = tiny_model(family)
    with Rig(model, **settings) as roomy, Rig(model, num_pages=num_pages, **settings) as tight:
        assert tokens_of(tight.run(asks)) == tokens_of(roomy.run(asks))
        assert tight.scheduler.stats.num_preemptions > 0 == roomy.scheduler.stats.num_preemptions
        assert tight.scheduler.stats.num_dropped_results == 0, "a short pool waits for results before it preempts"
