"""The exactness matrix of latent and sparse attention with drafters, in float64: any difference is a bug.

MTP modules, lookups and scripts, over chunking, prefix cache, overlap, padding, preemptions and a pool in which pages
are evicted; contexts below and above top-k. Every cell asserts from counters that its condition occurred.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any, NamedTuple

import pytest

from outrider.core.params import SamplingParams
from outrider.mixers.latent import latent_mixer as latent_mixer
from outrider.mixers.mixer import EVERY_LENGTH
from tests.covering import grid
from tests.drafters.hybrid_rig import DRAFTERS, VOCAB, drafter_of, script_with_errors
from tests.drafters.latent_rig import FAMILIES, TOP_K, latent_of
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tokens_alone, tokens_of
from tests.models.paged import PagedModel, Piece

K = 3
LENGTH = 20
SHARED = prompt_of(0, 32, VOCAB)
FEW = [7, 8]  # a text of so few tokens is what a lookup can continue


def noisy(seed: int, temperature: float = 4.0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=LENGTH, **fields)


ASKS = [
    Ask([*SHARED, *prompt_of(1, 11, VOCAB)], greedy(LENGTH)),
    Ask([*SHARED, *prompt_of(2, 5, VOCAB)], noisy(7)),
    Ask([*SHARED[:16], *FEW * 6], noisy(4, 6.0, allowed_token_ids=FEW)),
    Ask(prompt_of(4, 1, VOCAB), noisy(6)),  # its context never exceeds top-k
    Ask([*SHARED, *FEW * 4, 7], noisy(7, 6.0, allowed_token_ids=FEW)),
]


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return tokens_alone(latent_of(family), ASKS)


class Cell(NamedTuple):
    chunk: int = 64
    prefix: bool = True
    overlap: bool = False
    padded: bool = False
    preempted: bool = False
    num_pages: int = 64

    @property
    def settings(self) -> dict[str, Any]:
        padding = {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)} if self.padded else {}
        return {"max_num_batched_tokens": self.chunk, "enable_prefix_caching": self.prefix, "overlap": self.overlap,
                "max_num_seqs": 3, "max_model_len": 80, "num_pages": self.num_pages, **padding}


CELLS = {
    "plain": Cell(),
    "chunks": Cell(chunk=13, preempted=True),
    "no prefix cache": Cell(chunk=17, prefix=False, overlap=True, preempted=True),
    "overlap, padded": Cell(chunk=17, overlap=True, padded=True, preempted=True),
    "tiny pool": Cell(chunk=24, overlap=True, padded=True, preempted=True, num_pages=9),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_models_own_choice(family: str) -> None:
    """Every token from the whole text anew."""
    known = list(ASKS[0].prompt)
    for token in expected(family)[0][0]:
        assert token == int(PagedModel(latent_of(family)).logits([Piece(0, known)])[0][-1].argmax())
        known.append(token)
    texts = [tokens for (tokens,) in expected(family)]
    assert all(len(set(texts[i])) > 4 for i in (0, 1, 3)), "constant text would hide mistakes"


# Its groups, and with them the pool, change with the drafter.
NOT_THERE = {("glm_moe_dsa", "tiny pool"), ("hy_v4", "tiny pool")}
# Every two of family, drafter and cell meet in a quick test; of HY-V4, which differs by sinks, gates and streams alone,
# one does.
ALL = grid([values for values in product([name for name in FAMILIES if name != "hy_v4"], DRAFTERS, CELLS)
            if values[::2] not in NOT_THERE], strength=2)
ALL += [pytest.param(*values, marks=() if values[1:] == ("mtp", "chunks") else pytest.mark.long)
        for values in product(["hy_v4"], DRAFTERS, CELLS) if values[::2] not in NOT_THERE]


@pytest.mark.parametrize(("family", "drafter", "name"), ALL)
def test_tokens_are_a_function_of_the_request(
    family: str, drafter: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, choices = CELLS[name], {True: 0, False: 0}
    operations = latent_mixer.ORDINARY

    def counted(operation: Any, is_sparse: bool) -> Any:
        def call(*args: Any) -> Any:
            choices[is_sparse] += 1
            return operation(*args)

        return call

    watched = operations._replace(attend=counted(operations.attend, True),
                                  attend_everywhere=counted(operations.attend_everywhere, False))
    monkeypatch.setattr(latent_mixer, "ORDINARY", watched)
    right = {tuple(ask.prompt): run for ask, (run,) in zip(ASKS, expected(family), strict=True)}
    made = drafter_of(drafter, latent_of(family), K, script_with_errors(right, range(1, K + 2)))
    with Rig(latent_of(family), drafter=made, **cell.settings) as rig:
        outputs = rig.run(ASKS, after_step=rig.preempt if cell.preempted else None)
        assert tokens_of(outputs) == expected(family)
        again = rig.run_one_by_one([ASKS[0], ASKS[3]])
        assert tokens_of(again) == [expected(family)[0], expected(family)[3]]
        assert_occurred(rig, cell, drafter)
    assert choices[False] > 0 and (choices[True] > 0) == (family != "deepseek_v3"), "contexts on both sides of top-k"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", pytest.param("hy_v4", marks=pytest.mark.long)])
def test_captured_steps_behind_short_contexts_ask_no_indexer(family: str, drafter: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of other steps, whether the graph for short contexts serves or one that serves all."""
    lengths: list[int] = []
    operations = latent_mixer.ORDINARY

    def choose(*args: Any) -> Any:
        lengths.append(args[3].page_table.shape[1])
        return operations.choose(*args)

    right = {tuple(ask.prompt): run for ask, (run,) in zip(ASKS, expected(family), strict=True)}
    monkeypatch.setattr(latent_mixer, "ORDINARY", operations._replace(choose=choose))
    for stands_in in (False, True):
        made = drafter_of(drafter, latent_of(family), K, script_with_errors(right, range(1, K + 2)))
        with Rig(latent_of(family), drafter=made, **Cell().settings) as rig:
            captured = AsCaptured(rig, stands_in=stands_in)
            alone = rig.run_one_by_one([ASKS[3]])
            decoding = [key for key in captured.met if not key.has_prompts]
            assert tokens_of(alone) == [expected(family)[3]] and decoding
            if not stands_in:
                assert {key.longest for key in decoding} == {TOP_K - K}
                assert len(lengths) < len(decoding), "the prompt's step at most"
            plain = (0, 1, 3)  # no captured step of these tests takes the parameters of the others
            assert tokens_of(rig.run([ASKS[i] for i in plain])) == [expected(family)[i] for i in plain]
            met = {key.longest for key in captured.met if not key.has_prompts}
            assert met == {EVERY_LENGTH, TOP_K - K}
        lengths.clear()


def assert_occurred(rig: Rig, cell: Cell, drafter: str) -> None:
    stats, cache = rig.scheduler.stats, rig.scheduler.cache
    parts = [part for result in rig.results for part in result.requests if part.num_drafted > 0]
    accepted = {part.num_accepted for part in parts}
    assert accepted == set(range(K + 1)) or (drafter == "mtp" and len(accepted) == K), "numbers of accepted drafts"
    assert cell.chunk >= 43 or any(not all(batch.samples) for batch in rig.batches), "prompts cut into chunks"
    assert stats.max_steps_in_flight == (2 if cell.overlap else 1), "steps in flight"
    assert (rig.runner.num_padded_steps > 0) == cell.padded, "padded beyond scheduled"
    assert (stats.num_preemptions > 0) == cell.preempted, "preemptions"
    assert (cache.stats.hit_tokens > 0) == cell.prefix, "hits"
    assert (cache.pool.num_evicted > 0) == (cell.num_pages < 64), "evictions"
    assert rig.num_poisoned > 0, "poisoned pages"
    assert max(batch.bounds[0] for batch in rig.batches) > TOP_K
