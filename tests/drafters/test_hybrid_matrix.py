"""The exactness matrix of recurrent hybrids with drafters, in float64: any difference is a bug.

NemotronH, Qwen3-Next and Qwen3.5 with their MTP modules, with lookups and with scripts, over chunking, prefix cache,
overlap, padding, preemptions and pools in which checkpoints and pages are evicted. Free pages and rows hold NaN in all
of it. Every cell asserts from counters that its condition occurred.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams
from tests.covering import grid
from tests.drafters.hybrid_rig import (
    DRAFTERS,
    FAMILIES,
    GLM5_NEXT,
    QWEN4_EXP,
    VOCAB,
    HybridRig,
    Script,
    drafter_of,
    hybrid_of,
    script_with_errors,
)
from tests.engine.harness import SETTINGS, Ask, Rig, greedy, prompt_of, tokens_alone, tokens_of
from tests.models import oracle

K = 3
LENGTH = 22
TOKEN_BLOCKS = {"qwen4_exp": QWEN4_EXP, "glm5_next": GLM5_NEXT}
SHARED = prompt_of(0, 32, VOCAB)
FEW = [7, 8]  # a text of so few tokens is what a lookup can continue


def noisy(seed: int, max_tokens: int, temperature: float = 4.0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, **fields)


ASKS = [
    Ask([*SHARED, *prompt_of(1, 11, VOCAB)], greedy(LENGTH)),
    Ask([*SHARED, *prompt_of(2, 5, VOCAB)], noisy(7, LENGTH)),
    Ask([*SHARED[:16], *FEW * 6], noisy(4, LENGTH, 6.0, allowed_token_ids=FEW)),
    Ask(prompt_of(4, 1, VOCAB), noisy(6, LENGTH)),
    Ask([*SHARED, *FEW * 4, 7], noisy(7, LENGTH, 6.0, allowed_token_ids=FEW)),
]
SMALL = [Ask([*SHARED[: 16 * (i % 3)], *prompt_of(20 + i, 1 + 5 * i, VOCAB)],
             noisy(i, (4, 12, 7, 6)[i]) if i % 2 else greedy((4, 12, 7, 6)[i])) for i in range(4)]


@functools.cache
def expected(family: str, is_small: bool = False) -> list[list[list[int]]]:
    return tokens_alone(hybrid_of(family), SMALL if is_small else ASKS)


@functools.cache
def next_turn(family: str) -> tuple[Ask, list[list[list[int]]]]:
    """A chat that goes on after the third answer."""
    turn = Ask([*ASKS[2].prompt, *expected(family)[2][0], *prompt_of(9, 3, VOCAB)], noisy(3, 6))
    with Rig(hybrid_of(family), enable_prefix_caching=False) as rig:
        return turn, tokens_of(rig.run([turn]))


def script_of(family: str, distances: Sequence[int], is_small: bool = False) -> Script:
    asks = SMALL if is_small else ASKS
    right = {tuple(ask.prompt): run for ask, (run,) in zip(asks, expected(family, is_small), strict=True)}
    return script_with_errors(right, distances)


class Cell(NamedTuple):
    """`num_pages` of None: a pool with room for everything."""

    chunk: int = 64
    prefix: bool = True
    overlap: bool = False
    padded: bool = False
    preempted: bool = False
    num_pages: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        padding = {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)} if self.padded else {}
        return {"max_num_batched_tokens": self.chunk, "enable_prefix_caching": self.prefix, "overlap": self.overlap,
                "max_num_seqs": 3, "max_model_len": 80, "num_pages": self.num_pages or 160, "checkpoint_interval": 32,
                "compares": False, **padding}


CELLS = {
    "plain": Cell(),
    "chunks": Cell(chunk=13, preempted=True),
    "no prefix cache": Cell(chunk=17, prefix=False, overlap=True, preempted=True),
    "overlap, padded": Cell(chunk=17, overlap=True, padded=True, preempted=True),
    "tiny pool": Cell(num_pages=8),
    "tiny pool, overlap, padded": Cell(chunk=24, overlap=True, padded=True, num_pages=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_models_own_choice(family: str) -> None:
    assert expected(family)[0][0] == oracle.greedy(hybrid_of(family), ASKS[0].prompt, LENGTH)
    texts = [tokens for (tokens,) in expected(family)]
    assert len({tuple(text) for text in texts}) == len(ASKS)
    assert all(len(set(texts[i])) > 4 for i in (0, 1, 3)), "constant text would hide mistakes"


# Every two of family, drafter and cell meet in a quick test.
ALL = grid(list(product(FAMILIES, DRAFTERS, CELLS)), strength=2)


@pytest.mark.parametrize(("family", "drafter", "name"), ALL)
def test_tokens_and_states_are_a_function_of_the_request(family: str, drafter: str, name: str) -> None:
    cell = CELLS[name]
    made = drafter_of(drafter, hybrid_of(family), K, script_of(family, range(1, K + 2)))
    # States are compared with a recomputation, which takes its time, for one family of each recurrence.
    options = cell.settings | {"compares": name == "plain" and family in ("nemotron_h", "qwen3_next")}
    with HybridRig(hybrid_of(family), drafter=made, **options) as rig:
        outputs = rig.run(ASKS, after_step=rig.preempt if cell.preempted else None)
        assert tokens_of(outputs) == expected(family)
        if cell.num_pages is not None:  # what was left is mostly gone, but not what a request has just left itself
            assert tokens_of(rig.run([ASKS[2]])) == expected(family)[2:3]
            turn, wanted = next_turn(family)
            assert tokens_of(rig.run([turn])) == wanted
        assert_occurred(rig, cell)


def assert_occurred(rig: HybridRig, cell: Cell) -> None:
    stats, cache = rig.scheduler.stats, rig.scheduler.cache
    is_tiny = cell.num_pages is not None
    assert rig.accepted == set(range(K + 1)), "every number of accepted drafts"
    assert max(batch.num_tokens for batch in rig.batches) <= cell.chunk
    assert cell.chunk >= 43 or any(not all(batch.samples) for batch in rig.batches), "prompts cut into chunks"
    assert stats.max_steps_in_flight == (2 if cell.overlap else 1), "steps in flight"
    assert (rig.runner.num_padded_steps > 0) == cell.padded, "padded beyond scheduled"
    assert (stats.num_preemptions > 0) == (cell.preempted or is_tiny), "preemptions"
    assert (cache.checkpoints.num_written > 0) == cell.prefix, "checkpoints"
    assert (cache.stats.hit_tokens > 0) == (cache.states.num_restored > 0) == cell.prefix, "hits, and states"
    assert (cache.pool.num_evicted > 0) == (rig.num_evicted["checkpoints"] > 0) == is_tiny, "evictions"
    assert rig.num_poisoned > 0, "poisoned pages"
    if rig._compares:
        assert rig.num_compared > 20 and (rig.num_checkpoints > 5) == cell.prefix


@pytest.mark.parametrize("family", FAMILIES)
def test_seven_drafts(family: str) -> None:
    seen: set[int] = set()
    for distances in ((8, 7, 6, 1), (5, 4, 3, 2, 1)):
        made = drafter_of("scripted", hybrid_of(family), 7, script_of(family, distances))
        with HybridRig(hybrid_of(family), drafter=made, **Cell(chunk=40, overlap=len(distances) == 4).settings) as rig:
            assert tokens_of(rig.run(ASKS)) == expected(family)
            assert rig.scheduler.cache.stats.hit_tokens > 0
            seen |= rig.accepted
    assert seen == set(range(8))


# Random engines


class Life(NamedTuple):
    family: str
    drafter: str
    k: int
    depth: int
    num_pages: int
    chunk: int
    max_requests: int
    distances: list[int]  # of errors in the script
    prefix: bool
    preempts: bool
    is_padded: bool
    order: list[int]


def lives_of(family: str) -> st.SearchStrategy[Life]:
    return st.builds(
        Life, st.just(family), st.sampled_from(DRAFTERS), st.integers(0, 4), st.integers(1, 3),
        st.sampled_from([7, 9, 14, 40]), st.integers(5, 40), st.integers(1, 4),
        st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from([True, True, True, False]), st.booleans(),
        st.booleans(), st.permutations(range(4)),
    )


def run_life(life: Life) -> Counter[str]:
    family, k, wanted = life.family, life.k, expected(life.family, True)
    made = drafter_of(life.drafter, hybrid_of(family), k, script_of(family, life.distances, True)) if k else None
    with HybridRig(hybrid_of(family), drafter=made, depth=life.depth, max_num_seqs=life.max_requests,
                   num_pages=life.num_pages, max_model_len=64, max_num_batched_tokens=life.chunk, compares=False,
                   enable_prefix_caching=life.prefix, checkpoint_interval=32,
                   pad_requests=(6,) if life.is_padded else ()) as rig:
        outputs = rig.run([SMALL[i] for i in life.order], after_step=rig.preempt if life.preempts else None)
        assert tokens_of(outputs) == [wanted[i] for i in life.order]
        stats, cache = rig.scheduler.stats, rig.scheduler.cache
        return Counter({
            "lives": 1, life.family: 1, life.drafter: 1, "preemptions": stats.num_preemptions,
            "dropped": stats.num_dropped_results, "hits": cache.stats.hit_tokens, "pages evicted":
            rig.num_evicted["pages"], "checkpoints evicted": rig.num_evicted["checkpoints"],
            "restored": cache.states.num_restored, "written": cache.checkpoints.num_written,
            "folded": cache.checkpoints.num_folded, "padded": rig.runner.num_padded_steps,
            **{f"{accepted} accepted": 1 for accepted in rig.accepted},
        })


def run_lives(count: int) -> None:
    totals: Counter[str] = Counter()
    for family in FAMILIES:

        @settings(max_examples=count // len(FAMILIES))
        @given(lives_of(family))
        def every(life: Life) -> None:
            totals.update(run_life(life))

        every()
    assert totals["lives"] >= count
    needed = {*FAMILIES, *DRAFTERS, *(f"{n} accepted" for n in range(5)), "preemptions", "dropped", "hits", "restored",
              "pages evicted", "checkpoints evicted", "written", "folded", "padded"}
    assert needed <= (+totals).keys(), f"never occurred: {needed - (+totals).keys()}"


def test_any_engine() -> None:
    run_lives(60)


@pytest.mark.long
def test_many_more_of_any_engine() -> None:
    run_lives(1600)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", TOKEN_BLOCKS)
def test_chosen_blocks(family: str, drafter: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All conditions at once, on hybrids that attend to chosen blocks. One of them reads n-grams of drafts, and one
    attends to latents."""
    monkeypatch.setitem(FAMILIES, family, TOKEN_BLOCKS[family])
    monkeypatch.setitem(SETTINGS, "checkpoint_interval", 32)
    wanted = expected(family)
    right = {tuple(ask.prompt): run for ask, (run,) in zip(ASKS, wanted, strict=True)}
    script = script_with_errors(right, (2, 3, 1, 5))
    target = hybrid_of(family)
    with HybridRig(target, compares=not overlap, drafter=drafter_of(drafter, target, K, script), max_num_seqs=3,
                   pad_requests=(4,), pad_tokens=(6, 24, 72), max_num_batched_tokens=17, overlap=overlap) as rig:
        assert tokens_of(rig.run(ASKS, after_step=rig.preempt)) == tokens_of(rig.run(ASKS)) == wanted
        assert rig.scheduler.stats.num_preemptions > 0 and rig.scheduler.cache.stats.hit_tokens > 0
        accepted = {part.num_accepted for result in rig.results for part in result.requests if part.num_drafted}
        assert accepted == {0, 1, 2, 3}
