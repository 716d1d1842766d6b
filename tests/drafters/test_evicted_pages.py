"""A drafter whose own pages have been evicted: the target's hit is as long as ever, and the drafts are those of a head
that sees only what is left. In float64, against the naive reference.

Here drafters have groups of their own, because their layers have another geometry than the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cache.groups import Group
from outrider.cache.prefix import PageHashes
from tests.drafters.checkpoints import Drafter, eagle, make_drafter, random_tensors, write
from tests.drafters.rig import DraftRig
from tests.drafters.test_drafts import assert_as_reference
from tests.engine.harness import CONFIGS, Ask, greedy, prompt_of, save_folder, tiny_model, tokens_of

K, HIT = 3, 64
ASK = Ask(prompt_of(31, 73), greedy(8))


def narrow_eagle(folder: Path) -> Drafter:
    """A quarter of the target's bytes a token: pages of 64 tokens beside those of 16."""
    config, shapes = eagle(4)
    return write("eagle", folder, config, random_tensors(shapes))


def narrow_model(folder: Path) -> Drafter:
    config = CONFIGS["llama"] | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}
    save_folder(folder, config, seed=5)
    return Drafter("draft_model", folder, config, {})


def rig_of(drafter: Drafter, **settings: Any) -> DraftRig:
    return DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(K), **settings)


def own_group(rig: DraftRig) -> Group:
    target, own = rig.scheduler.cache.groups
    assert target.is_target and not own.is_target
    return own


def evict(rig: DraftRig, group: Group, column: int) -> None:
    """The drafter's page of the ask's tokens in this column, as if others had needed it."""
    cache = rig.scheduler.cache
    digest = PageHashes(group.page_tokens, ()).upto(ASK.prompt, column + 1)[column]
    page = cache.pool.find((group.index, digest))
    assert page is not None and not cache.pool.is_held(page)
    del cache.pool._cached[page]
    cache.pool._forget(page)
    cache.pool._add_blank(page)


@pytest.mark.parametrize(("columns", "valid_from"), [((), 0), ((0,), 16), ((0, 2), 48), ((3,), HIT + 1)])
def test_drafts_after_a_hit_without_some_of_the_drafters_pages(tmp_path: Path, columns: tuple[int, ...],
                                                               valid_from: int) -> None:
    """Without its last page there is no hidden state to go on from, so that the next slot is missing too."""
    drafter = make_drafter("eagle", "llama", tmp_path)
    with rig_of(drafter) as rig:
        first = tokens_of(rig.run([ASK]))
        assert_as_reference(rig.proposals, [ASK], drafter, "llama")
        rig.proposals.clear()
        assert own_group(rig).page_tokens == 16
        for column in columns:
            evict(rig, own_group(rig), column)
        (output,) = rig.run([ASK])
        assert output.metrics.num_cached_tokens == HIT, "the drafter does not shorten it"
        assert tokens_of([output]) == first
        assert_as_reference(rig.proposals, [ASK], drafter, "llama", lambda p: valid_from)


@pytest.mark.parametrize(("make", "missing"), [(narrow_eagle, 1), (narrow_model, 0)])
def test_a_hit_that_ends_within_a_page_of_the_drafter(tmp_path: Path, make: Any, missing: int) -> None:
    """A hit of 48 tokens: nothing of the drafter's page of 64 can be had, and a head lacks a hidden state too."""
    drafter, prompt = make(tmp_path), ASK.prompt
    shorter = Ask([*prompt[:48], *prompt_of(32, 9)], greedy(12))
    with rig_of(drafter) as rig:
        assert own_group(rig).page_tokens == 64
        rig.run([ASK])
        rig.proposals.clear()
        (output,) = rig.run([shorter])
        assert output.metrics.num_cached_tokens == 48
        assert_as_reference(rig.proposals, [shorter], drafter, "llama", lambda p: 48 + missing)
        # Its page was filled from the middle on: a later hit must not use it.
        rig.proposals.clear()
        again = Ask([*shorter.prompt, *output.outputs[0].token_ids], greedy(4))
        (output,) = rig.run([again])
        assert output.metrics.num_cached_tokens == 64
        assert_as_reference(rig.proposals, [again], drafter, "llama", lambda p: 64 + missing)
        # A page that was filled from its beginning serves the whole hit.
        rig.proposals.clear()
        (output,) = rig.run([ASK])
        assert output.metrics.num_cached_tokens == 64
        assert_as_reference(rig.proposals, [ASK], drafter, "llama")


def test_under_pressure_the_drafters_pages_go_first(tmp_path: Path) -> None:
    drafter = make_drafter("eagle", "llama", tmp_path)
    other = Ask(prompt_of(33, 60), greedy(8))
    with rig_of(drafter, num_pages=15) as rig:
        first = tokens_of(rig.run([ASK]))
        rig.run([other])
        assert rig.scheduler.cache.pool.num_evicted > 0
        rig.proposals.clear()
        (output,) = rig.run([ASK])
        hit = output.metrics.num_cached_tokens
        assert hit >= 16 and tokens_of([output]) == first
        assert_as_reference(rig.proposals, [ASK], drafter, "llama", lambda p: hit + 1)
