"""Requests that arrive together share the beginning that one of them computes, in whole engines: the tokens are those
of requests that share nothing, in float64, for every kind of layer, drafter and backend; and the beginning is computed
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.models.base import Model
from tests.drafters.hybrid_rig import hybrid_of, mtp_of
from tests.drafters.latent_rig import latent_of
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of
from tests.engine.recurrent_rig import hybrid
from tests.engine.test_not_finite import CURSED, NEVER, STEM, cursed_model

VOCAB = 24  # the least of these models'
COMMON = prompt_of(0, 40, VOCAB)
ASKS = [
    *[Ask([*COMMON, *prompt_of(i, 3 + i, VOCAB)], greedy(6)) for i in range(1, 4)],
    Ask([*COMMON[:20], *prompt_of(7, 5, VOCAB)], SamplingParams(temperature=1.0, seed=3, max_tokens=6)),
    Ask(COMMON, SamplingParams(temperature=1.0, seed=4, max_tokens=6)),
]
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 200, "num_pages": 200}
MODELS: dict[str, Callable[[], Model]] = {
    "full": lambda: tiny_model("llama"),
    "sliding": lambda: tiny_model("sliding"),
    "full and sliding": lambda: tiny_model("gemma3"),
    "latent": lambda: latent_of("deepseek_v3"),
    "sparse": lambda: latent_of("deepseek_v32"),
    "mamba2": lambda: hybrid("mamba2"),
    "gated delta": lambda: hybrid("gated_delta"),
}
SHARED = [0, 40, 40, 20, 39]  # of their tokens; one is always computed


def run(model: Model, **settings: Any) -> list[RequestOutput]:
    """All asks at once. The common beginning of each is found as far as whole pages of all groups have it."""
    with Rig(model, **SETTINGS | settings) as rig:
        outputs = rig.run(ASKS)
        expected = expected_hits(rig)
        if rig.scheduler.cache.takes_checkpoints and settings.get("max_num_batched_tokens") == 24:
            expected[3] = 0  # it finds the pages after their writer has passed, so that it keeps the state itself
        assert hits(outputs) == expected and rig.scheduler.cache.promises.num_shared > 0
        return outputs


def expected_hits(rig: Rig) -> list[int]:
    size = max(group.page_tokens for group in rig.scheduler.cache.groups if group.is_target)
    return [shared // size * size for shared in SHARED]


def alone(model: Model, asks: Sequence[Ask] = ASKS, **settings: Any) -> list[RequestOutput]:
    with Rig(model, **SETTINGS | settings | {"enable_prefix_caching": False}) as rig:
        return rig.run_one_by_one(asks)


def hits(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.metrics.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [24, 200])
def test_a_common_beginning_is_computed_once(name: str, budget: int) -> None:
    model = MODELS[name]()
    assert tokens_of(run(model, max_num_batched_tokens=budget)) == tokens_of(alone(model))


@pytest.mark.parametrize("backend", ["torch", "native", "flex"])
def test_every_backend_writes_pages_before_requests_of_the_same_step_read_them(backend: str) -> None:
    model = tiny_model("gemma3", torch.float32)
    assert tokens_of(run(model, attention_backend=backend)) == tokens_of(alone(model))


def test_samples_of_one_prompt_compute_it_once() -> None:
    params = SamplingParams(n=6, temperature=1.0, seed=2, max_tokens=5)
    with Rig(tiny_model("llama"), **SETTINGS) as rig:
        outputs = rig.run([Ask(COMMON, params)])
        assert sum(rig.batches[0].num_known) == 40 + 5 * 8, "all in the first step, and all but one behind two pages"
    with Rig(tiny_model("llama"), **SETTINGS | {"enable_prefix_caching": False}) as rig:
        assert tokens_of(outputs) == tokens_of(rig.run([Ask(COMMON, params)]))


@pytest.mark.parametrize("name", ["latent", "nemotron_h", "qwen3_next"])
def test_drafts_of_a_sharer_equal_an_unshared_requests(name: str) -> None:
    """Drafts of an MTP module in float64, by the tokens that they follow."""
    model = latent_of("deepseek_v3") if name == "latent" else hybrid_of(name)
    asks = [Ask(ask.prompt, greedy(10)) for ask in ASKS]
    guesses = []
    for prefix in (True, False):
        with DraftRig(model, drafter=mtp_of(model, 2), enable_prefix_caching=prefix, **SETTINGS) as rig:
            outputs = rig.run(asks) if prefix else rig.run_one_by_one(asks)
            guesses.append((tokens_of(outputs), {p.known: p.drafts for p in rig.proposals}))
            assert hits(outputs) == (expected_hits(rig) if prefix else [0] * 5)
    assert guesses[0] == guesses[1]


@pytest.mark.parametrize("family", ["llama", "mamba2", "deepseek_v32"])
@pytest.mark.parametrize("depth", [1, 3])
def test_sharers_of_a_request_that_is_not_finite_give_their_own_tokens(family: str, depth: int) -> None:
    model = cursed_model(family, torch.float64)
    cursed = Ask([*STEM, CURSED, 9], greedy(4))
    healthy = [Ask([*STEM, 9, 10 + i], greedy(6, **NEVER)) for i in range(3)]
    with Rig(model, depth=depth, **SETTINGS) as rig:
        failed, *outputs = rig.run([cursed, *healthy])
        assert rig.scheduler.stats.num_restarts >= (3 if depth > 1 or family == "llama" else 0)
    assert "not finite" in (failed.outputs[0].error or "")
    assert tokens_of(outputs) == tokens_of(alone(model, healthy))
