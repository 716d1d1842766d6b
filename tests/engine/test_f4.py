"""F4: prefix caching with drafts on hybrid models. The tokens are those of the model alone, and after every step the
recurrent states and checkpoints are those of the tokens, computed one by one. In float64: any difference is a bug.

Every cell asserts from counters that its condition occurred.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.core import Axis
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.runner.worker import Worker
from tests.covering import grid, num_examples
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import SETTINGS, Ask, Rig, greedy, prompt_of, tokens_alone, tokens_of
from tests.engine.recurrent_rig import HYBRIDS, StateRig, hybrid
from tests.engine.runners import PicklingRunner
from tests.engine.test_no_host_reads import PlansMayRead, guard_steps
from tests.models import oracle

K = 3
LENGTH = 14
SHARED = prompt_of(0, 32)
FEW = [7, 8]  # a text of so few tokens is what a lookup can continue
ASKS = [
    Ask([*SHARED, *prompt_of(1, 14)], greedy(LENGTH)),
    Ask([*SHARED, *prompt_of(2, 13)], SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH)),
    Ask([*SHARED[:16], *FEW * 6], greedy(LENGTH, allowed_token_ids=FEW)),
    Ask(prompt_of(4, 1), SamplingParams(temperature=1.4, top_k=30, seed=6, max_tokens=LENGTH)),
    Ask([*SHARED, *prompt_of(5, 15)], greedy(LENGTH, stop_token_ids=list(range(3, 30)))),
]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints at every second page."""
    monkeypatch.setitem(SETTINGS, "checkpoint_interval", 32)


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return tokens_alone(hybrid(family), ASKS)


class Cell(NamedTuple):
    chunk: int
    drafter: str
    prefix: bool
    overlap: bool
    preempted: bool

    @property
    def settings(self) -> dict[str, Any]:
        drafts = {"method": "ngram", "num_speculative_tokens": K, "auto": False, "prompt_lookup_min": 1}
        padding = {"pad_requests": (4,), "pad_tokens": (6, 24, 72)} if self.chunk == 17 else {}
        return {"max_num_batched_tokens": self.chunk, "enable_prefix_caching": self.prefix, "overlap": self.overlap,
                "max_num_seqs": 3, "speculative_config": drafts if self.drafter != "none" else None, **padding}

    def __str__(self) -> str:
        return "-".join([f"chunk{self.chunk}", self.drafter, *(n for n in self._fields[2:] if getattr(self, n))])


def scripted(family: str, every: int) -> ScriptedDrafter:
    """Right but for every so many tokens; how many drafts there are changes with the length."""
    right = {tuple(ask.prompt): sample for ask, (sample,) in zip(ASKS, expected(family), strict=True)}

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        return [(t + 1) % 256 if (i + 1) % every == 0 else t for i, t in enumerate(right[prompt])]

    return ScriptedDrafter(K, script, count=lambda position: K if position % 5 else position % (K + 1))


def drafter_of(cell: Cell, family: str) -> Drafter | None:
    return scripted(family, every=4 if cell.preempted else 7) if cell.drafter == "scripted" else None


# Every three of the conditions meet in a quick cell.
# KDA is a kind of gated delta, and the tests of states have both in every case.
EACH = pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long if name == "kda" else ())
                                          for name in HYBRIDS])
CELLS = grid(list(itertools.product(HYBRIDS, (5, 17, 64), ("none", "ngram", "scripted"), *[(False, True)] * 3)),
             strength=3, arguments=lambda family, *values: (family, Cell(*values)))


@EACH
def test_f4_the_reference_is_the_models_own_choice(family: str) -> None:
    for ask in (0, 4):
        (tokens,) = expected(family)[ask]
        assert tokens == oracle.greedy(hybrid(family), ASKS[ask].prompt, LENGTH)[: len(tokens)]
    assert len({tuple(tokens) for (tokens,) in expected(family)}) == len(ASKS)


@pytest.mark.parametrize(("family", "cell"), CELLS)
def test_f4_tokens_and_states_are_a_function_of_the_request(family: str, cell: Cell) -> None:
    with StateRig(hybrid(family), drafter=drafter_of(cell, family), compares=not cell.overlap, **cell.settings) as rig:
        outputs = rig.run(ASKS, after_step=rig.preempt if cell.preempted else None)
        assert tokens_of(outputs) == expected(family)
        stats, cache = rig.scheduler.stats, rig.scheduler.cache
        accepted = {part.num_accepted for result in rig.results for part in result.requests}
        assert (cache.stats.hit_tokens > 0) == (cache.states.num_restored > 0) == cell.prefix
        assert (cache.checkpoints.num_written > 0) == cell.prefix
        assert stats.max_steps_in_flight == (2 if cell.overlap else 1)
        assert (stats.num_preemptions > 0) == cell.preempted
        assert (rig.runner.num_padded_steps > 0) == (cell.chunk == 17)
        assert (max(accepted) > 0) == (cell.drafter != "none"), "drafts accepted"
        assert rig.num_poisoned > 0
        if not cell.overlap:
            assert rig.num_compared > 15 and (rig.num_checkpoints > 5) == cell.prefix


@EACH
def test_f4_every_accepted_count_occurs(family: str) -> None:
    seen: set[tuple[int, int]] = set()
    num_checkpoints = 0
    config = Cell(64, "scripted", True, False, False).settings
    for every in (2, 3, 4, 99):
        with StateRig(hybrid(family), drafter=scripted(family, every), **config) as rig:
            assert tokens_of(rig.run(ASKS)) == expected(family)
            seen |= {(part.num_drafted, part.num_accepted) for r in rig.results for part in r.requests}
            num_checkpoints += rig.num_checkpoints
    assert {accepted for _, accepted in seen} == set(range(K + 1))
    assert {drafted - accepted for drafted, accepted in seen} == set(range(K + 1)), "and every rejected count"
    assert num_checkpoints > 10


LENGTHS = (6, 11, 12, 13, 14, 15, 27, 28, 29)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@EACH
def test_f4_the_next_turn_of_a_chat_begins_at_the_last_boundary(family: str, overlap: bool) -> None:
    """Whatever is accepted in the last step; and the answer is the one that a fresh engine gives."""
    prompt = prompt_of(3, 21)
    with Rig(hybrid(family), enable_prefix_caching=False) as plain:
        ((answer,),) = tokens_of(plain.run([Ask(prompt, greedy(30))]))
        turns = [[*prompt, *answer[:n], *prompt_of(8, 5)] for n in LENGTHS]
        wanted = tokens_of(plain.run_one_by_one([Ask(turn, greedy(6)) for turn in turns]))
    config = Cell(64, "scripted", True, overlap, False).settings
    num_folded = 0
    for n, turn, tokens in zip(LENGTHS, turns, wanted, strict=True):
        drafter = ScriptedDrafter(K, lambda given, index: answer if given == tuple(prompt) else [])
        with StateRig(hybrid(family), drafter=drafter, compares=not overlap, **config) as rig:
            assert tokens_of(rig.run([Ask(prompt, greedy(n))])) == [[answer[:n]]]
            num_folded += rig.scheduler.cache.checkpoints.num_folded
            outputs = rig.run([Ask(turn, greedy(6))])
            assert tokens_of(outputs) == [tokens]
            # The last token of the answer was sampled and never computed.
            assert outputs[0].metrics.num_cached_tokens == (len(prompt) + n - 1) // 16 * 16
    assert num_folded > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@EACH
def test_f4_a_pool_that_runs_short_changes_nothing(family: str, overlap: bool) -> None:
    """The scheduler preempts by itself, and checkpoints give way to whoever runs."""
    asks = [Ask(prompt_of(i, 20), SamplingParams(temperature=0.7, seed=i, max_tokens=24)) for i in range(3)]
    options = {"max_model_len": 64, "max_num_seqs": 3, "overlap": overlap, "speculative_config": {
        "method": "ngram", "num_speculative_tokens": K, "auto": False, "prompt_lookup_min": 1}}
    with Rig(hybrid(family), enable_prefix_caching=False, **options) as roomy:
        wanted = tokens_of(roomy.run(asks))
    num_preemptions = 0
    for num_pages in (5, 8):
        with StateRig(hybrid(family), num_pages=num_pages, compares=not overlap, **options) as tight:
            assert tokens_of(tight.run(asks)) == wanted
            assert tight.scheduler.cache.pool.num_evicted > 0
            num_preemptions += tight.scheduler.stats.num_preemptions
    assert num_preemptions > 0


# Two of them end just behind a boundary: if enough drafts are accepted, a fold brings the state there.
SMALL = [Ask([*SHARED[: 16 * (i % 3)], *prompt_of(20 + i, 1 + 5 * i)],
             SamplingParams(temperature=float(i % 2), seed=i, max_tokens=(4, 12, 7, 6)[i])) for i in range(4)]


@functools.cache
def small_expected(family: str) -> list[list[list[int]]]:
    return tokens_alone(hybrid(family), SMALL)


class Life(NamedTuple):
    family: str
    depth: int
    num_pages: int
    chunk: int
    every: int  # error in the drafts
    k: int
    max_requests: int
    preempts: bool
    order: list[int]
    is_padded: bool


LIVES = st.builds(
    Life, st.sampled_from(sorted(HYBRIDS)), st.integers(1, 3), st.sampled_from([7, 9, 14, 40]), st.integers(5, 40),
    st.integers(2, 9), st.integers(0, 4), st.integers(1, 4), st.booleans(), st.permutations(range(4)), st.booleans(),
)


def run_life(life: Life) -> Counter[str]:
    wanted, every, k = small_expected(life.family), life.every, life.k
    right = {tuple(ask.prompt): sample for ask, (sample,) in zip(SMALL, wanted, strict=True)}
    drafter = ScriptedDrafter(k, lambda prompt, _: [(t + (i % every == 0)) % 256 for i, t in enumerate(right[prompt])])
    drafts = {"method": "ngram", "num_speculative_tokens": k, "auto": False} if k else None
    with StateRig(hybrid(life.family), drafter=drafter if k else None, speculative_config=drafts, depth=life.depth,
                  max_num_seqs=life.max_requests, num_pages=life.num_pages, max_model_len=64, compares=life.depth == 1,
                  max_num_batched_tokens=life.chunk, pad_requests=(6,) if life.is_padded else ()) as rig:
        outputs = rig.run([SMALL[i] for i in life.order], after_step=rig.preempt if life.preempts else None)
        assert tokens_of(outputs) == [wanted[i] for i in life.order]
        scheduler, cache = rig.scheduler, rig.scheduler.cache
        return Counter(
            lives=1, preemptions=scheduler.stats.num_preemptions, dropped=scheduler.stats.num_dropped_results,
            hits=cache.stats.hit_tokens, evictions=cache.pool.num_evicted, restored=cache.states.num_restored,
            written=cache.checkpoints.num_written, folded=cache.checkpoints.num_folded,
            padded=rig.runner.num_padded_steps,
        )


def test_f4_any_engine() -> None:
    totals: Counter[str] = Counter()
    count = num_examples(25)

    @settings(max_examples=count)
    @given(LIVES)
    def every(life: Life) -> None:
        totals.update(run_life(life))

    every()
    assert totals["lives"] >= count and len(totals) == 9 and min(totals.values()) > 0, totals


def test_f4_batches_and_results_are_plain_data() -> None:
    """Checkpoints, folds and restores pass through pickle: a runner may live elsewhere."""
    with StateRig(hybrid("mamba2"), drafter=scripted("mamba2", 5), compares=False,
                  **Cell(17, "scripted", True, True, False).settings) as rig:
        rig.engine.worker.runner = PicklingRunner(rig.runner)
        assert tokens_of(rig.run(ASKS)) == expected("mamba2")
        assert rig.scheduler.cache.states.num_restored > 0


@EACH
def test_f4_a_step_reads_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = scripted(family, 4)  # whose script a plain engine writes
    monkeypatch.setattr("outrider.mixers.paged.torch_backend.TorchBackend", PlansMayRead)
    config = Cell(17, "scripted", True, False, False).settings
    with StateRig(hybrid(family), drafter=drafter, compares=False, **config) as rig:
        guard = guard_steps(rig, torch.inference_mode)
        assert tokens_of(rig.run(ASKS)) == expected(family)
        assert rig.scheduler.cache.checkpoints.num_written > 5
        assert guard.num_operations > 200 * len(rig.batches)


@EACH
def test_f4_memory_per_request_grows_with_the_drafts_by_their_inputs_alone(family: str,
                                                                           caplog: pytest.LogCaptureFixture) -> None:
    model, sizes = hybrid(family), []
    inputs = sum(mixer.spec.input_bytes for mixer in model.recurrent_layers.values())
    for k in range(5):
        drafts = {"method": "ngram", "num_speculative_tokens": k, "auto": False} if k else None
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="outrider"):
            worker = Worker(EngineConfig("tiny", **SETTINGS, speculative_config=drafts), model)
        row = worker.info.layout.recurrent.capacity(worker.info.limits)
        assert worker.device_step.recurrent.num_bytes == worker.info.limits.extent(Axis.ROWS) * row.row_bytes
        assert f"for {k} drafts" in caplog.text and f"{row.checkpoint_pages} pages a checkpoint" in caplog.text
        sizes.append(row.row_bytes - k * inputs)
        worker.close()
    assert len(set(sizes)) == 1


def test_f4_a_drafter_with_recurrent_layers_is_refused_by_name() -> None:
    class Recurring(ScriptedDrafter):
        def cache_layers(self) -> list[Any]:
            return hybrid("mamba2").cache_layers()

    with pytest.raises(ValueError, match="drafter 'scripted' has recurrent layers"):
        Rig(hybrid("gated_delta"), drafter=Recurring(1, lambda prompt, index: []))
