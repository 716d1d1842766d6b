"""Hybrids keep their states at the ends of images, so that another question about the same pictures hits."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from outrider.features.images.part import ImageInputs
from tests.engine.harness import greedy
from tests.images.recipes import RECIPES
from tests.images.rig import ImageRig, Scene
from tests.images.test_matrix import answers_of

FAMILY, PAGE = "qwen3_5", 16
LARGE, SMALL = RECIPES[FAMILY].shapes[2], RECIPES[FAMILY].shapes[0]
PARAMS = greedy(5, logprobs=0, ignore_eos=True)


def question(seed: int, *images: int, length: int = 41, gap: int = 20) -> Scene:
    """Images with text between them, and a question behind the last one."""
    texts = ((1, 19), *((50, gap) for _ in images[1:]), (seed, length))
    return Scene(texts, tuple((image, LARGE if image == images[0] else SMALL) for image in images), PARAMS)


def ends_of(rig: ImageRig, scene: Scene) -> list[int]:
    (part,) = rig.engine.checks.check(scene.prompt(FAMILY), scene.params).input_parts
    assert isinstance(part, ImageInputs)
    return [image.end for image in part.images]


@pytest.mark.parametrize("chunk", [23, 150])
def test_another_question_about_the_same_pictures_hits(chunk: int) -> None:
    asked = [question(2, 7), question(3, 7), question(4, 7, 8), question(5, 7, 8), question(6, 7, 9)]
    settings: dict[str, Any] = {"max_num_batched_tokens": chunk, "overlap": False}
    with ImageRig(FAMILY, enable_prefix_caching=False, **settings) as rig:
        expected = [answers_of(rig.run_scenes([scene]))[0] for scene in asked]
    with ImageRig(FAMILY, **settings) as rig:
        hits = []
        for scene, right in zip(asked, expected, strict=True):
            (output,) = rig.run_scenes([scene])
            assert answers_of([output]) == [right]
            hits.append(output.metrics.num_cached_tokens)
        first, second = (end // PAGE * PAGE for end in ends_of(rig, asked[2]))
    assert 0 < first < second
    if chunk < 100:
        assert hits == [0, first, first, second, second]  # the other second image begins behind this
    else:  # one step may keep the state of its last image alone
        assert hits[:2] == [0, first] and hits[3] == second


def test_ends_of_many_images_leave_room_for_the_end_of_the_prompt() -> None:
    """A prompt of many images in one step keeps as many states as a request may have, the last ones."""
    images = tuple(range(7, 13))
    with ImageRig(FAMILY, max_num_batched_tokens=150) as rig:
        rig.run_scenes([question(2, *images, length=30, gap=5)])
        most = rig.scheduler.cache.checkpoints.capacity.max_checkpoints
        assert rig.results and all(len(result.checkpoints) <= most for result in rig.results)
        (output,) = rig.run_scenes([question(3, *images, length=30, gap=5)])
        assert output.metrics.num_cached_tokens == ends_of(rig, question(3, *images, gap=5))[-1] // PAGE * PAGE
        (again,) = rig.run_scenes([question(2, *images, length=30, gap=5)])
        assert again.metrics.num_cached_tokens > output.metrics.num_cached_tokens, "the end of the prompt too"
