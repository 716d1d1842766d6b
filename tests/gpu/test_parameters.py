"""Sampling parameters on the card: every decode step is captured, and its tokens are the reference's, drafts or not."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core import Uncaptured
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from tests.engine.harness import Ask, Rig, prompt_of
from tests.gpu.rig import LENGTH, SETTINGS, GpuRig, assert_same_tokens, loaded
from tests.gpu.test_engines import folder_of, spec

pytestmark = [pytest.mark.gpu, pytest.mark.together("llama")]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
LISTS = {"logit_bias": {token: 1.5 for token in range(30, 90)}, "bad_words_token_ids": ((5,), (7, 8))}
EARLY = {"min_tokens": 9, "stop_token_ids": [3, 4, 9]}
PARAMETERS: list[dict[str, Any]] = [
    {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, PENALTIES, LISTS, {"allowed_token_ids": list(range(0, 256, 3))},
    EARLY, {"logprobs": 5}, {}, {"temperature": 0.0},
    {"top_k": 60, "top_p": 0.9, "min_p": 0.01, "logprobs": 3, **PENALTIES, **LISTS, **EARLY},
]


def asks() -> list[Ask]:
    params = [{"temperature": 0.8, "seed": i, "max_tokens": LENGTH} | one for i, one in enumerate(PARAMETERS)]
    return [Ask(prompt_of(i, 5 + 3 * i) * (1 + i % 2), SamplingParams(**one)) for i, one in enumerate(params)]


@functools.cache
def reference() -> list[RequestOutput]:
    """Every request alone, on the CPU in float64, with all log-probabilities."""
    settings = SETTINGS | {"attention_backend": "torch", "max_num_seqs": 1, "enable_prefix_caching": False,
                           "logprobs_mode": "processed"}
    with Rig(loaded(folder_of("llama"), on_cpu=True, dtype=torch.float64), **settings) as rig:
        return rig.run_one_by_one([Ask(ask.prompt, replace(ask.params, logprobs=-1)) for ask in asks()])


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_no_parameter_needs_an_uncaptured_step(drafter: str) -> None:
    config = None if drafter == "none" else spec("ngram") | {"prompt_lookup_min": 1}
    with GpuRig(loaded(folder_of("llama")), speculative_config=config) as rig:
        outputs = rig.run(asks())
        assert set(rig.engine.stats.uncaptured) <= {Uncaptured.NEW_SIZE}, rig.engine.stats.uncaptured_line
        assert rig.runner.num_replays > rig.runner.num_uncaptured
        # The reference's log-probabilities are divided by temperatures already.
        scaled_by_one = [ask if ask.params.is_greedy else replace(ask, params=replace(ask.params, temperature=1.0))
                         for ask in asks()]
        assert_same_tokens(outputs, reference(), scaled_by_one)
        for output, ask in zip(outputs, asks(), strict=True):
            named = output.outputs[0].logprobs
            assert (named is None) == (ask.params.logprobs is None)
            assert named is None or all(len(entry) >= ask.params.logprobs for entry in named)


def test_what_still_runs_uncaptured_says_why() -> None:
    """The log-probabilities of a whole vocabulary; those of a prompt only while it is computed."""
    with GpuRig(loaded(folder_of("llama"))) as rig:
        rig.run([Ask(prompt_of(1, 9), SamplingParams(temperature=0, max_tokens=6, logprobs=-1))])
        assert {reason.name for reason in rig.engine.stats.uncaptured} == {"MANY_LOGPROBS"}
        before = rig.runner.num_uncaptured
        rig.run([Ask(prompt_of(1, 60), SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1))])
        assert rig.runner.num_uncaptured - before == 2, "two chunks of the prompt"
