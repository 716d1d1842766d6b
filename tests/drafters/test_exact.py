"""Drafters never change the tokens, greedy or sampled, whatever happens to the batch; nor do they wait for the device.

The heads here are random and seldom right; `test_trained` has one that is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from outrider.core.params import SamplingParams
from tests.covering import grid
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_alone, tokens_of
from tests.engine.test_no_host_reads import guard_steps, quiet_rig

SHARED = prompt_of(0, 32)
LENGTH = 10
ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(LENGTH)),
    Ask([*SHARED, *prompt_of(2, 3)], SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH)),
    Ask([*SHARED[:16], *prompt_of(3, 19)], SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3,
                                                         max_tokens=LENGTH, speculative=2)),
    Ask(prompt_of(4, 5), greedy(LENGTH, speculative=False)),
    Ask([*SHARED, *prompt_of(5, 6)], greedy(LENGTH, frequency_penalty=0.5)),
]
TIGHT = {"llama": 9, "gemma3": 18}
KINDS = ("eagle", "eagle3", "eagle3_speculators", "mtp")


@cache
def expected(family: str) -> list[list[list[int]]]:
    return tokens_alone(tiny_model(family), ASKS)


# Every two of these meet in a quick cell.
ALL = grid(list(product((1, 5), KINDS, ("llama", "gemma3"))), strength=2)


@pytest.mark.parametrize(("k", "kind", "family"), ALL)
def test_tokens_do_not_depend_on_the_drafter(k: int, kind: str, family: str, tmp_path: Path) -> None:
    drafter = make_drafter(kind, family, tmp_path)
    common = {"speculative_config": drafter.speculative(k), "max_num_seqs": 3, "max_model_len": 64}
    with Rig(tiny_model(family), overlap=False, max_num_batched_tokens=9, pad_requests=(4,), pad_tokens=(12,),
             **common) as rig:
        assert tokens_of(rig.run(ASKS)) == expected(family)
        assert rig.scheduler.cache.stats.hit_tokens > 0 and rig.runner.num_padded_steps > 0
    num_pages = TIGHT[family]
    with Rig(tiny_model(family), overlap=True, max_num_batched_tokens=30, num_pages=num_pages, **common) as rig:
        assert tokens_of(rig.run(ASKS, after_step=rig.preempt)) == expected(family)
        stats = rig.scheduler.stats
        assert stats.max_steps_in_flight == 2 and stats.num_preemptions > 0 and stats.num_dropped_results > 0


def test_lookup_first_and_the_head_otherwise(tmp_path: Path) -> None:
    drafter = make_drafter("eagle3", "llama", tmp_path)
    config = drafter.speculative(3) | {"method": ["ngram", "eagle3"]}
    with Rig(tiny_model("llama"), speculative_config=config) as rig:
        assert rig.step.drafter is not None and rig.step.drafter.name == "ngram+eagle3"
        assert tokens_of(rig.run(ASKS)) == expected("llama")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafting_step_reads_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(kind, "llama", tmp_path)
    with quiet_rig(monkeypatch, "llama", speculative_config=drafter.speculative(3), pad_requests=(4,)) as rig:
        guard = guard_steps(rig, torch.inference_mode)
        asks = [Ask(ask.prompt, replace(ask.params, max_tokens=3)) for ask in ASKS[:2]]
        rig.run(asks)
        outputs = rig.run(asks)  # with hits, so that first slots are filled
        assert all(output.metrics.num_cached_tokens == 32 for output in outputs)
        assert [tokens for (tokens,) in tokens_of(outputs)] == [tokens[:3] for (tokens,) in expected("llama")[:2]]
        assert guard.num_operations > 200 * len(rig.batches)
