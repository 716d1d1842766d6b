"""Prompts with images, as users give them: what is read, and what is refused with an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from outrider.config import EngineConfig
from outrider.features.images.part import ImageInputs
from outrider.features.images.reader import expanded
from tests.engine.harness import Rig, greedy, tiny_model
from tests.images.recipes import BEGIN, END, RECIPES, SOFT, allow_small_budget
from tests.images.rig import ImageRig

RUN = [BEGIN, *[SOFT] * 6, END]


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


@pytest.fixture(scope="module")
def gemma() -> Iterator[ImageRig]:
    with pytest.MonkeyPatch.context() as patch:
        allow_small_budget(patch)
        with ImageRig("gemma4_unified") as rig:
            yield rig


def picture(seed: int = 0, shape: tuple[int, int] = (2, 3)) -> np.ndarray:
    return RECIPES["gemma4_unified"].image(seed, shape)


def ids_of(rig: Rig, ids: list[int], images: Any, **more: Any) -> list[int]:
    return list(rig.engine.checks.check({"prompt_token_ids": ids, "multi_modal_data": {"image": images}} | more,
                                        greedy(1)).token_ids)


def test_a_placeholder_becomes_the_tokens_of_its_image(gemma: ImageRig) -> None:
    assert ids_of(gemma, [5, SOFT, 6], picture()) == [5, *RUN, 6]
    assert ids_of(gemma, [5, SOFT, SOFT, 6], [picture(), picture(1, (1, 5))]) == [
        5, *RUN, BEGIN, *[SOFT] * 5, END, 6]
    assert ids_of(gemma, [5, *RUN, 6], [picture()]) == [5, *RUN, 6], "they may be there already"
    assert ids_of(gemma, [SOFT], (picture(),)) == RUN
    request = gemma.engine.checks.check({"prompt_token_ids": [5, SOFT], "multi_modal_data": {"image": picture()},
                                         "multi_modal_uuids": {"image": ["name"]}}, greedy(1))
    (part,) = request.input_parts
    assert isinstance(part, ImageInputs) and [(own.offset, own.end) for own in part.images] == [(2, 8)]
    assert ids_of(gemma, [5, 6], []) == ids_of(gemma, [5, 6], None) == [5, 6]


@pytest.mark.parametrize("ids", [[5, 6], [5, SOFT, SOFT], [5, *RUN, SOFT], [BEGIN, *[SOFT] * 5, END], [*[SOFT] * 6]])
def test_places_and_images_must_be_as_many(gemma: ImageRig, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"placeholder token\(s\) for images \(id 300\), and 1 image\(s\) with 6 tokens"
                                         " were given: write one placeholder where each image stands"):
        ids_of(gemma, ids, [picture()])


def test_runs_of_one_token_are_not_taken_for_placeholders() -> None:
    runs = [[BEGIN, SOFT, END]] * 2
    assert expanded([1, *runs[0], *runs[1]], SOFT, runs) == [1, *runs[0], *runs[1]]
    assert expanded([SOFT, 1, SOFT], SOFT, runs) == [*runs[0], 1, *runs[1]]


@pytest.mark.parametrize(("given", "message"), [
    ({"multi_modal_data": {"image": [None]}}, "an image is None: give the pixels"),
    ({"multi_modal_data": {"video": [1]}}, "multi_modal_data: 'video' is not served"),
    ({"multi_modal_data": {"images": [1]}}, "'images' is not served: did you mean image"),
    ({"multi_modal_data": [1]}, "multi_modal_data must be"),
    ({"multi_modal_data": {"image": "cat.png"}}, "image"),
    ({"multi_modal_data": {"image": np.zeros((4, 4, 3))}}, "uint8"),
    ({"mm_processor_kwargs": {"detail": ["low", "low"]}}, "detail has 2 values, and the prompt has 1 image"),
    ({"mm_processor_kwargs": {"detail": "huge"}}, "detail must be one of low, auto, high, got 'huge'"),
    ({"mm_processor_kwargs": {"max_soft_tokens": 7}}, "max_soft_tokens=7 is not supported"),
])
def test_what_cannot_be_served_is_refused(gemma: ImageRig, given: dict[str, Any], message: str) -> None:
    prompt = {"prompt_token_ids": [SOFT], "multi_modal_data": {"image": picture()}} | given
    with pytest.raises(ValueError, match=message):
        gemma.engine.checks.check(prompt, greedy(1))


@pytest.mark.parametrize(("family", "options", "words"), [
    ("gemma4_unified", {"max_pixels": 64}, "'max_pixels' is not an option of this model's images"),
    ("gemma4_unified", {"max_soft_tokens": [6]}, "max_soft_tokens"),
    ("qwen3_vl", {"max_pixel": 64}, "did you mean max_pixels"),
    ("qwen3_vl", {"max_pixels": [64]}, "max_pixels must be"),
    ("qwen3_vl", {5: 6, "a": 7}, "5 is not an option"), ("qwen3_vl", {"size": {"shortest_edge": {1}}}, "shortest_edge"),
    ("qwen3_vl", {"min_pixels": 1 << 30, "max_pixels": 1 << 30}, "max_model_len is 160"),
])
def test_options_that_cannot_be_taken_are_named(family: str, options: dict[Any, Any], words: str) -> None:
    """The last one would resize to gigabytes, were its tokens not counted before."""
    recipe = RECIPES[family]
    with ImageRig(family) as rig, pytest.raises(ValueError, match=words):
        ids_of(rig, [5, SOFT], recipe.image(0, recipe.shapes[0]), mm_processor_kwargs=options)


def test_an_area_may_be_given_by_its_section() -> None:
    recipe = RECIPES["qwen3_vl"]
    with ImageRig("qwen3_vl") as rig:
        size = {"size": {"shortest_edge": 64, "longest_edge": 64}}
        assert ids_of(rig, [5, SOFT], recipe.image(0, recipe.shapes[0]), mm_processor_kwargs=size) == [5, SOFT]


def test_the_number_of_images_is_limited() -> None:
    with ImageRig("gemma4_unified", limit_mm_per_prompt={"image": {"count": 1}}) as rig:
        assert ids_of(rig, [SOFT], picture()) == RUN
        with pytest.raises(ValueError, match=r"At most 1 image\(s\) may be provided in one prompt, got 2"):
            ids_of(rig, [SOFT, SOFT], [picture(), picture()])
    for limit in ({"image": -1}, {"image": "2"}, {"video": 2}):
        with pytest.raises(ValueError, match="limit_mm_per_prompt must be an object"):
            EngineConfig("tiny", limit_mm_per_prompt=limit)
    assert EngineConfig("tiny", limit_mm_per_prompt={"image": 2, "video": 0}).takes_images
    assert not EngineConfig("tiny", limit_mm_per_prompt={"image": 0}).takes_images


def test_a_model_without_images_says_so() -> None:
    with Rig(tiny_model("llama")) as rig:
        assert not rig.engine.model.takes_images
        with pytest.raises(ValueError, match="tiny is served without images: use a model that sees"):
            ids_of(rig, [5], picture())


def test_a_tower_is_loaded_for_the_first_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.features.images import encoder_on_device
    from outrider.runner.worker import Worker
    from tests.images.rig import model_of, tower_of

    loaded = []
    monkeypatch.setattr(encoder_on_device, "load_tower", lambda *args: loaded.append(1) or tower_of("gemma4_unified"))
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_pages": 32, "max_num_seqs": 4}
    for limit, expected in ((None, 0), ({"image": 0}, 0), ({"image": 1}, 1)):
        config = EngineConfig("tiny", limit_mm_per_prompt=limit, **settings)
        worker = Worker(config, model_of("gemma4_unified"))
        encoders = worker.device_step.state.params.inputs.encoders
        assert (len(loaded), len(encoders)) == (expected, 0 if limit == {"image": 0} else 1)
        worker.close()
