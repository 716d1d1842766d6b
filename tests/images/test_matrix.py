"""The exactness matrix of prompts with images, in float64: any difference is a bug.

Families whose images are seen both ways, and causal ones with positions of one and of three components; without drafts,
with lookups, scripts and a prediction module; over chunks, hits, preemptions and batch mates. Free pages hold NaN in
all of it. Every cell asserts from counters that its condition occurred.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from outrider.core.outputs import RequestOutput
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from tests.covering import grid
from tests.drafters.hybrid_rig import mtp_of
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import greedy
from tests.images.recipes import BEGIN, RECIPES, SOFT, allow_small_budget
from tests.images.rig import ImageRig, Scene, model_of

K, LENGTH = 3, 12
FAMILIES = ("gemma4_unified", "gemma4_edge", "qwen3_5", "qwen3_vl")
DRAFTERS = ("none", "ngram", "scripted", "mtp")


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


@functools.cache
def scenes(family: str) -> tuple[Scene, ...]:
    """One prompt twice, with another first image, with another second one, with the first image elsewhere, without
    images, and with three."""
    one, two, three = RECIPES[family].shapes
    texts, params = ((1, 19), (2, 17), (3, 9)), greedy(LENGTH, logprobs=0, ignore_eos=True)
    return (
        Scene(texts, ((1, one), (2, two)), params),
        Scene(texts, ((1, one), (2, two)), params),
        Scene(texts, ((7, one), (2, two)), params),
        Scene(texts, ((1, one), (8, two)), params),
        Scene(((4, 30), (2, 17)), ((1, one),), params),
        Scene(((1, 19),), (), params),
        Scene(((6, 3), (7, 1), (1, 19), (3, 2)), ((3, three), (1, one), (2, two)), params),
    )


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer with their log-probabilities, which show every difference of what was computed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.tokens == other.tokens and np.allclose(self.logprobs, other.logprobs,
                                                                                         rtol=0, atol=1e-9)

    def __hash__(self) -> int:
        return hash(self.tokens)


def answers_of(outputs: Sequence[RequestOutput]) -> list[Answer]:
    found = []
    for output in outputs:
        (sample,) = output.outputs
        assert sample.error is None and sample.logprobs is not None
        values = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        found.append(Answer(tuple(sample.token_ids), tuple(values)))
    return found


@functools.cache
def expected(family: str) -> list[Answer]:
    with ImageRig(family, enable_prefix_caching=False, max_num_seqs=1, overlap=False) as rig:
        found = answers_of(rig.run_scenes(scenes(family)))
    assert found[0] == found[1] and all(one != other for one, other in combinations(found[1:], 2))
    return found


class Cell(NamedTuple):
    chunk: int = 64
    prefix: bool = True
    overlap: bool = False
    preempted: bool = False
    padded: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        padding = {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)} if self.padded else {}
        return {"max_num_batched_tokens": self.chunk, "enable_prefix_caching": self.prefix, "overlap": self.overlap,
                "max_num_seqs": 4, **padding}


CELLS = {
    "plain": Cell(),
    "chunks": Cell(chunk=23, preempted=True),
    "cold": Cell(chunk=29, prefix=False, overlap=True, preempted=True),
    "padded": Cell(chunk=31, overlap=True, padded=True),
}


def drafter_of(name: str, family: str) -> Drafter | None:
    match name:
        case "none":
            return None
        case "ngram":
            return NgramDrafter(K, min_n=1, max_n=4)
        case "mtp":
            return mtp_of(model_of(family), K)
    right: dict[tuple[int, ...], list[int]] = {}
    with ImageRig(family) as rig:
        for scene, answer in zip(scenes(family), expected(family), strict=True):
            right[rig.engine.checks.check(scene.prompt(family), scene.params).token_ids] = list(answer.tokens)
    # The same ids with other images go on differently: then drafts are wrong, which must not matter.
    wrong_at = {2, 5, 9, 10}
    return ScriptedDrafter(K, lambda prompt, index: [token if at not in wrong_at else (token + 1) % 290
                                                     for at, token in enumerate(right.get(prompt, ()))])


ALL = grid([cell for cell in product(FAMILIES, DRAFTERS, CELLS) if cell[0] == "qwen3_5" or cell[1] != "mtp"],
           strength=2)


@pytest.mark.parametrize(("family", "drafter", "name"), ALL)
def test_text_is_a_function_of_the_prompt_with_its_images(family: str, drafter: str, name: str) -> None:
    cell = CELLS[name]
    with ImageRig(family, drafter=drafter_of(drafter, family), **cell.settings) as rig:
        asked = scenes(family)
        first = answers_of(rig.run_scenes(asked, rig.preempt_inside if cell.preempted else None))
        again = answers_of(rig.run_scenes(asked[::-1]))[::-1]
        assert first == again == expected(family)
        stats, cache = rig.scheduler.stats, rig.scheduler.cache
        assert max(batch.num_tokens for batch in rig.batches) <= cell.chunk
        assert any(batch.num_requests > 1 for batch in rig.batches), "batch mates"
        assert (cache.stats.hit_tokens > 0) == cell.prefix, "hits"
        assert (stats.num_preemptions > 0) == cell.preempted, "preemptions"
        assert (rig.runner.num_padded_steps > 0) == cell.padded, "padded beyond scheduled"
        assert rig.num_poisoned > 0 and rig.encoder.num_encoded >= 5


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma4_unified"])
@pytest.mark.parametrize("chunk", [7, 9, 14])
def test_causal_images_are_cut_and_preempted_anywhere(family: str, chunk: int) -> None:
    with ImageRig(family, max_num_batched_tokens=chunk, enable_prefix_caching=chunk != 9, max_num_seqs=2) as rig:
        assert answers_of(rig.run_scenes(scenes(family), rig.preempt_inside)) == expected(family)
        assert rig.preempted_inside > 0 and rig.scheduler.stats.num_preemptions > rig.preempted_inside
        ends = [batch.bounds for batch in rig.batches]
        assert len(ends) > 40


def test_images_seen_both_ways_are_computed_whole() -> None:
    with ImageRig("gemma4_unified", max_num_batched_tokens=9, max_num_seqs=2) as rig:
        asked = scenes("gemma4_unified")
        assert answers_of(rig.run_scenes(asked)) == expected("gemma4_unified")
        spans = {tuple(image.offset for image in rig.engine.checks.check(
            scene.prompt("gemma4_unified"), scene.params).input_parts[0].images)  # type: ignore[attr-defined]
            for scene in asked if scene.images}
        assert len(spans) > 2
    with ImageRig("gemma4_unified", max_num_batched_tokens=7, max_num_seqs=2) as rig:
        with pytest.raises(ValueError, match="an image makes 6 tokens, which one step must compute together"):
            rig.run_scenes(asked[:1])


def test_the_module_drafts_alike_on_hits_and_in_chunks() -> None:
    """A prediction module embeds the token after each position: features must be one place ahead, and its rope must
    follow the components of positions."""
    found: list[dict[tuple[int, int, tuple[int, ...]], tuple[int, ...]]] = []
    for options in ({"enable_prefix_caching": False, "max_num_seqs": 1}, {"max_num_batched_tokens": 13},
                    {"max_num_batched_tokens": 31, "max_num_seqs": 4}):
        drafter = mtp_of(model_of("qwen3_5"), K)
        seen: dict[tuple[int, int, tuple[int, ...]], tuple[int, ...]] = {}
        with ImageRig("qwen3_5", drafter=drafter, **{"max_num_seqs": 2, "overlap": False} | options) as rig:
            watch(rig, drafter, seen)
            for index, scene in enumerate((*scenes("qwen3_5"), scenes("qwen3_5")[0])):
                rig.current = index % (len(scenes("qwen3_5")))  # type: ignore[attr-defined]
                rig.run_scenes([scene])
            hits = rig.scheduler.cache.stats.hit_tokens
        found.append(seen)
        assert (hits > 0) == ("enable_prefix_caching" not in options)
    cold, *others = found
    assert len(cold) > 40 and len(set(cold.values())) > 20
    for other in others:
        assert {key: drafts for key, drafts in other.items() if key in cold} == {
            key: drafts for key, drafts in cold.items() if key in other}


def watch(rig: ImageRig, drafter: Drafter, seen: dict[Any, tuple[int, ...]]) -> None:
    """Record what the drafter proposes, by the scene and its known tokens."""
    propose = drafter.propose

    def recorded(step: Step) -> Drafts:
        drafts = propose(step)
        for index in range(step.batch.padded.num_requests):
            if bool(step.goes_on[index]):
                row = int(step.batch.padded.rows[index])
                known = tuple(step.tokens[row, : int(step.known[row])].tolist())
                key = (rig.current, len(known), known)  # type: ignore[attr-defined]
                seen[key] = tuple(drafts.tokens[index, : int(drafts.counts[index])].tolist())
        return drafts

    drafter.propose = recorded  # type: ignore[method-assign]


@pytest.mark.parametrize("ends", [False, True])
def test_lookups_never_draft_a_placeholder(ends: bool) -> None:
    family, never = "gemma4_unified", torch.tensor(model_of("gemma4_unified").placeholders)
    drafter = NgramDrafter(K, min_n=1, max_n=2, never=never if ends else None)
    one, ids = RECIPES[family].shapes[0], [5, 6, 7, 8, SOFT, 9, 5, 6, 7]
    seen: dict[Any, tuple[int, ...]] = {}
    with ImageRig(family, drafter=drafter) as rig:
        rig.current = 0  # type: ignore[attr-defined]
        watch(rig, drafter, seen)
        request = rig.engine.checks.check({"prompt_token_ids": ids, "multi_modal_data": {
            "image": RECIPES[family].image(1, one)}}, greedy(6, logit_bias={8: 100.0, 301: 90.0}))
        rig.engine.add({"0": request})
        while rig.engine.has_work:
            rig.engine.step()
    assert any(SOFT in drafts for drafts in seen.values()) != ends
    assert any(BEGIN in drafts for drafts in seen.values())


def test_suffixes_never_draft_a_placeholder() -> None:
    text = [1, 2, 3, 4, SOFT, SOFT, 5, 1, 2, 3]
    assert SuffixDrafter().propose(0, text, 6, 4, "") == [4, SOFT, SOFT, 5]
    assert SuffixDrafter(never={SOFT}).propose(0, text, 6, 4, "") == [4]
