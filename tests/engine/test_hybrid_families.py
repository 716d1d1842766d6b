"""Hybrid families in whole engines: tokens are those of the model alone, with chunked prompts, prefix hits, preemptions
and drafts, and states and checkpoints are those of the tokens. In float64: any difference is a bug.

`test_f4.py` has the whole matrix for each kind of recurrent layer; here every further family meets all conditions at
once, without overlap, which compares states after every step, and with it.
"""

from __future__ import annotations

import functools

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.models.base import Model
from tests.engine.harness import SETTINGS, Ask, greedy, prompt_of, random_model, tokens_alone, tokens_of
from tests.engine.recurrent_rig import ALONE, StateRig
from tests.models import oracle
from tests.ranks.families import make_model

FAMILIES = ("bailing_hybrid", "granite_hybrid", "lfm2_bias", "lfm2_moe", "olmo_hybrid", "falcon_h1_norm", "qwen4_exp",
            "mamba2_alone",
            *(pytest.param(name, marks=pytest.mark.long) for name in ("glm5_next", "gated_delta_alone", "kda_alone")))
LENGTH = 10
SHARED = prompt_of(0, 32)
FEW = [7, 8]  # a text of so few tokens is what a lookup can continue
ASKS = [
    Ask([*SHARED, *prompt_of(1, 14)], greedy(LENGTH)),
    Ask([*SHARED, *prompt_of(2, 13)], SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH)),
    Ask([*SHARED[:16], *FEW * 6], greedy(LENGTH, allowed_token_ids=FEW)),
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "auto": False, "prompt_lookup_min": 1}


@functools.cache
def model_of(family: str) -> Model:
    return random_model(ALONE[family], torch.float64, 3) if family in ALONE else make_model(family, None)


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return tokens_alone(model_of(family), ASKS)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "overlap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_states_are_a_function_of_the_request(family: str, overlap: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "checkpoint_interval", 32)
    assert expected(family)[0][0] == oracle.greedy(model_of(family), ASKS[0].prompt, LENGTH)
    with StateRig(model_of(family), compares=not overlap, max_num_batched_tokens=17, overlap=overlap, max_num_seqs=3,
                  speculative_config=DRAFTS, pad_requests=(4,), pad_tokens=(6, 24, 72)) as rig:
        assert tokens_of(rig.run(ASKS, after_step=rig.preempt)) == expected(family)
        cache, accepted = rig.scheduler.cache, [p.num_accepted for result in rig.results for p in result.requests]
        assert cache.stats.hit_tokens > 0 and cache.states.num_restored > 0 and cache.checkpoints.num_written > 0
        assert rig.scheduler.stats.num_preemptions > 0 and max(accepted) > 0 and rig.runner.num_padded_steps > 0
        assert overlap or (rig.num_compared > 5 and rig.num_checkpoints > 2)
