"""A whole feature from outside the package, in engines with drafts and after failed steps; over two ranks in
`tests/ranks/test_outside_feature.py`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from outrider import feature_list
from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import RequestOutput
from outrider.feature_list import FEATURES, FeatureEntry, register_feature
from outrider.formats import RankGroup
from outrider.models.base import Model
from tests.engine.harness import CONFIGS, VOCAB, Rig, greedy, prompt_of, random_model
from tests.engine.recurrent_rig import HYBRIDS
from tests.unit.scaled_feature import ENTRY, Counter, FactorPlaces, Scaled, ScaledRows, scaled_layers

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "auto": False, "prompt_lookup_min": 1}
FACTORS = (1.5, None, 0.5, 1.5, 2.0, None)
PROMPTS = [prompt_of(3, 20, VOCAB) * 2, prompt_of(4, 33, VOCAB), prompt_of(3, 20, VOCAB) * 2, prompt_of(5, 7),
           prompt_of(6, 40), prompt_of(7, 9)]


@pytest.fixture(autouse=True)
def feature() -> Iterator[None]:
    register_feature(ENTRY)
    yield
    feature_list._registered.pop(ENTRY.name)


def model_of(family: str, group: RankGroup | None = None) -> Model:
    config = HYBRIDS[family] if family in HYBRIDS else CONFIGS[family]
    return random_model(config | {"tie_word_embeddings": False}, torch.float64, 7, group)


def scaled(model: Model, factor: float) -> Model:
    """A copy of the model whose weights are multiplied."""
    own = copy.deepcopy(model)
    for layer in scaled_layers(own):
        layer.format.dense().mul_(factor)
    own.finalize()
    return own


def generate(rig: Rig, prompts: Sequence[list[int]], factors: Sequence[float | None]) -> list[list[int]]:
    for index, (prompt, factor) in enumerate(zip(prompts, factors, strict=True)):
        request: CheckedRequest = rig.engine.checks.check(prompt, greedy(14))
        rig.engine.add({str(index): request if factor is None else request.with_part(Scaled(factor))})
        rig.outputs._outputs[str(index)] = RequestOutput.empty(str(index), None, prompt, greedy(14))
    done: dict[str, RequestOutput] = {}
    while rig.engine.has_work:
        done |= {output.request_id: output for output in rig.outputs.step() if output.finished}
    rig.assert_clean()
    assert all(output.outputs[0].error is None for output in done.values())
    return [done[str(index)].outputs[0].token_ids for index in range(len(prompts))]


def settings_of(drafts: bool) -> dict[str, Any]:
    return {"pad_requests": (4,), "pad_tokens": (8, 64)} | ({"speculative_config": DRAFTS} if drafts else {})


def places_of(rig: Rig) -> FactorPlaces:
    (places,) = rig.engine.scheduler._resources.all
    assert isinstance(places, FactorPlaces)
    return places


@pytest.mark.parametrize("family, drafts", [("llama", True), ("mamba2", True), ("gemma3", False)])
def test_requests_have_the_text_of_a_model_with_scaled_weights(family: str, drafts: bool) -> None:
    model, wanted = model_of(family), list[list[int]]()
    for prompt, factor in zip(PROMPTS, FACTORS, strict=True):
        with Rig(model if factor is None else scaled(model, factor), **settings_of(drafts)) as alone:
            wanted += generate(alone, [prompt], [None])
    assert wanted[0] != wanted[2], "the factor changes nothing"
    with Rig(model, **settings_of(drafts)) as rig:
        places, keeper = places_of(rig), rig.engine.keepers.find(Counter)
        assert keeper is not None
        assert generate(rig, PROMPTS, FACTORS) == wanted
        assert generate(rig, PROMPTS[::-1], FACTORS[::-1]) == wanted[::-1], "pages of the first run are found"
        assert places.most == 2 and not places.users, "three factors share two places"
        assert keeper.count == 0
        with pytest.raises(ValueError, match="a factor must be above 0"):
            generate(rig, PROMPTS[:2], (1.5, -1.0))
        assert keeper.count == 1, "the request that was added before"
        rows = rig.step.deltas
    assert isinstance(rows, ScaledRows) and rows.is_closed


def test_a_failed_step_forgets_what_the_feature_has_on_the_device() -> None:
    model = model_of("llama")
    with Rig(model, **settings_of(True)) as rig:
        wanted = generate(rig, PROMPTS, FACTORS)
        forward, num_left = rig.step.forward, 5

        def fail_once(*args: Any, **fields: Any) -> Any:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                raise RuntimeError("a fault of the device")
            return forward(*args, **fields)

        rig.step.forward = fail_once  # type: ignore[method-assign]
        assert generate(rig, PROMPTS, FACTORS) == wanted and num_left < 0


def test_a_second_feature_that_changes_products_is_refused() -> None:
    """One of the two would do nothing."""
    with pytest.raises(ValueError, match="two features give requests low-rank changes"):
        Rig(model_of("llama"), enable_lora=True, max_lora_rank=8)


def test_a_request_for_a_feature_that_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FeatureEntry("adapters", "outrider.features.gone.on_device:Gone", "outrider.features.gone.in_engine:Gone",
                           is_on=lambda config: config.enable_lora)
    monkeypatch.setattr(feature_list, "FEATURES", (missing,))
    with pytest.raises(ValueError, match="this installation of outrider cannot use adapters"):
        Rig(model_of("llama"), enable_lora=True)
    with pytest.raises(ValueError, match="a feature of the package has the name 'adapters'"):
        register_feature(FEATURES[0])
