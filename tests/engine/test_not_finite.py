"""Activations that are not finite end the request that computes them, and reach no page, state or token of others.

A weight of 0 times NaN is NaN, so a token that attention masks can still spoil those before it in its step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.models.base import Model
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CONFIGS, VOCAB, Ask, Rig, greedy, prompt_of, random_model, tokens_of
from tests.engine.recurrent_rig import HYBRIDS

CURSED = 7
FAMILIES = {name: (CONFIGS | HYBRIDS)[name] for name in ("llama", "sliding", "mamba2", "gated_delta")}
FAMILIES["deepseek_v32"] = LATENT["deepseek_v32"] | {"vocab_size": VOCAB}
STEM = [token for token in prompt_of(1, 60) if token != CURSED][:40]
NEVER = {"logit_bias": {CURSED: -100.0}}


def cursed_model(family: str, dtype: torch.dtype) -> Model:
    model: Any = random_model(FAMILIES[family], dtype, seed=3)
    model.embed_tokens.weight[CURSED] = torch.nan
    return model


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad_at", [17, 37])
def test_pages_before_a_bad_token_serve_others(family: str, dtype: torch.dtype, bad_at: int) -> None:
    """The bad token lies in a chunk of its prompt that yields nothing, so that the chunk's pages are published."""
    model = cursed_model(family, dtype)
    healthy = Ask([*STEM[:bad_at], 9, 10, 11], greedy(8, **NEVER))
    with Rig(model, enable_prefix_caching=False) as rig:
        expected = tokens_of(rig.run([healthy]))
    with Rig(model, max_num_batched_tokens=48, checkpoint_interval=16) as rig:
        (failed,) = rig.run([Ask([*STEM[:bad_at], CURSED, *prompt_of(2, 49 - bad_at)], greedy(4))])
        assert "not finite" in (failed.outputs[0].error or "") and not failed.outputs[0].token_ids
        (output,) = rig.run([healthy])
        assert tokens_of([output]) == expected
        assert output.metrics.num_cached_tokens == bad_at // 16 * 16, "what came before the bad token is found"


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_tokens_of_a_scan_before_a_bad_token_serve_others(family: str, dtype: torch.dtype) -> None:
    """The prompt with the bad token runs beside a healthy request and is the first to fill the page that both share;
    the checkpoint behind that page is the healthy one's, whose next prompt finds both."""
    model = cursed_model(family, dtype)
    first = Ask(STEM[:30], greedy(8, **NEVER))
    with Rig(model, enable_prefix_caching=False) as rig:
        ((answer,),) = tokens_of(rig.run([first]))
        then = Ask([*first.prompt, *answer, 9], greedy(8, **NEVER))
        expected = tokens_of(rig.run([then]))
    with Rig(model, max_num_batched_tokens=40, checkpoint_interval=64) as rig:
        bad = Ask([*first.prompt, *answer[:4], CURSED, *prompt_of(2, 57)], greedy(4))
        good, failed = rig.run([first, bad])
        assert tokens_of([good]) == [[answer]] and "not finite" in (failed.outputs[0].error or "")
        (output,) = rig.run([then])
        assert tokens_of([output]) == expected and output.metrics.num_cached_tokens == 32


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_that_is_not_finite_is_only_a_wrong_draft(family: str, dtype: torch.dtype, overlap: bool) -> None:
    model = cursed_model(family, dtype)
    asks = [Ask(STEM[:20], greedy(12, **NEVER)), Ask(STEM[5:14], greedy(9, **NEVER))]
    with Rig(model, overlap=False) as rig:
        expected = tokens_of(rig.run(asks))
    right = {tuple(ask.prompt): answer for ask, (answer,) in zip(asks, expected, strict=True)}
    drafter = ScriptedDrafter(3, lambda prompt, _: [CURSED if i % 4 == 2 else token
                                                    for i, token in enumerate(right[prompt])])
    with Rig(model, drafter=drafter, overlap=overlap) as rig:
        for _ in range(2):
            assert tokens_of(rig.run(asks)) == expected
        assert rig.engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_that_fails_publishes_nothing_of_the_step_that_failed(family: str, dtype: torch.dtype) -> None:
    model = cursed_model(family, dtype)
    with Rig(model) as rig:
        (failed,) = rig.run([Ask([*STEM, CURSED], greedy(4))])
        assert failed.outputs[0].error is not None
        (output,) = rig.run([Ask([*STEM, 9], greedy(4, **NEVER))])
        assert output.outputs[0].error is None and output.metrics.num_cached_tokens == 0


@pytest.mark.parametrize(("where", "dtype"), [("weights", torch.float32), ("one token", torch.float64),
                                              ("infinite logits", torch.float32)])
def test_a_drafter_that_computes_nan_harms_nobody(where: str, dtype: torch.dtype) -> None:
    """Its layers lie in the same pages as the target's, and its pages hold NaN then: the next owners of these pages,
    with a drafter and without, give the tokens of an engine that never had one."""
    target, draft = random_model(FAMILIES["llama"], dtype, seed=3), random_model(FAMILIES["llama"], dtype, seed=4)
    own: Any = draft
    match where:
        case "weights":
            for slot in draft.weights().values():
                slot.store(torch.full(slot.shape, torch.nan, dtype=torch.float64))
        case "one token":
            own.embed_tokens.weight[::3] = torch.nan
        case "infinite logits":
            own.norm.weight.fill_(torch.inf)
    asks = [Ask(STEM[:n], SamplingParams(max_tokens=8, speculative=k, temperature=temperature, seed=n))
            for n, k, temperature in ((20, 3, 0), (9, 0, 0), (34, 3, 1.0), (17, 0, 1.0), (5, 2, 1.0))]
    with Rig(target, overlap=False) as rig:
        expected = tokens_of(rig.run(asks))
    network = DraftModelNetwork(draft, target.num_layers, target.vocab_size)
    drafter = AutoregressiveDrafter("draft_model", network, 3)
    with Rig(target, drafter=drafter, num_pages=24, poison=False) as rig:
        for _ in range(2):
            assert tokens_of(rig.run(asks)) == expected
        assert rig.engine.stats.num_draft_tokens > 0 and not rig.engine.stats.num_drafter_faults
        assert where == "infinite logits" or bool(rig.step.pool.data.view(dtype).isnan().any())
