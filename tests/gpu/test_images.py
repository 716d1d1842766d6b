"""Images on the card: whole tiny engines of the four families that see, against requests alone on the CPU in float64.

Chunked prompts, prefix hits, poisoned pages, batch mates, lookups, and the prediction module of Qwen3.5, which embeds
images too. In 16 bits near-ties are many: there, exact mode must have the bits of each request alone.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from outrider import LLM
from outrider.core import Uncaptured
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from tests.engine.harness import Ask, greedy
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import TIE, GpuRig, assert_same_tokens, loaded, sampled, scratch
from tests.images import rig as on_cpu
from tests.images.recipes import RECIPES, VOCAB, allow_small_budget
from tests.images.rig import ImageRig, Scene
from tests.models.prediction_modules import add_modules

LENGTH = 14
SETTINGS: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 4, "num_pages": 400,
                            "max_logprobs": VOCAB}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
MODULE = {"method": "mtp", "num_speculative_tokens": 3, "auto": False}
DRAFTERS: dict[str, dict[str, Any] | None] = {"none": None, "ngram": LOOKUP, "mtp": MODULE}
SPANS = ("gemma4_unified", "gemma4", "gemma4_experts")  # their images are seen in both directions
EXACT = (("gemma4_edge", "ngram"), ("qwen3_5", "mtp"), ("qwen3_vl", "ngram"))


def cells(pairs: Sequence[tuple[str, str]], kind: str = "") -> Any:
    return pytest.mark.parametrize(("family", "drafter"), [
        pytest.param(family, drafter, id=f"{family}-{drafter}", marks=pytest.mark.together(f"{family} seen{kind}"))
        for family, drafter in pairs])


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


@functools.cache
def folder_of(family: str) -> Path:
    if family != "qwen3_5":
        return on_cpu.folder_of(family)
    folder = scratch() / "qwen3_5 that sees"
    shutil.copytree(on_cpu.folder_of(family), folder)
    return add_modules(family, folder)


def scenes(family: str) -> tuple[Scene, ...]:
    """One prompt twice, with another first image, with the first image elsewhere, without images, and with three.
    Greedy and sampled in turn."""
    one, two, three = RECIPES[family].shapes
    texts = ((1, 19), (2, 17), (3, 9))
    pictures = ((texts, ((1, one), (2, two))), (texts, ((1, one), (2, two))), (texts, ((7, one), (2, two))),
                (((4, 30), (2, 17)), ((1, one),)), (((1, 19),), ()),
                (((6, 3), (7, 1), (1, 19), (3, 2)), ((3, three), (1, one), (2, two))))
    return tuple(Scene(own, images, sampled(index, LENGTH) if index % 2 else greedy(LENGTH, ignore_eos=True))
                 for index, (own, images) in enumerate(pictures))


def with_logprobs(asked: Sequence[Scene], count: int) -> list[Scene]:
    return [replace(scene, params=replace(scene.params, logprobs=count)) for scene in asked]


class SeeingRig(GpuRig):
    """An engine on the card that is asked for scenes."""

    def __init__(self, family: str, drafter: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        folder = folder_of(family)
        super().__init__(loaded(folder, dtype), source=folder, speculative_config=DRAFTERS[drafter],
                         **SETTINGS | settings)
        self.family = family

    def __enter__(self) -> SeeingRig:
        return self

    def see(self, asked: Sequence[Scene]) -> list[RequestOutput]:
        """Run all scenes at once."""
        for index, scene in enumerate(asked):
            request = self.engine.checks.check(scene.prompt(self.family), scene.params)
            self.engine.add({str(index): request})
            self.outputs._outputs[str(index)] = RequestOutput.empty(str(index), None, list(request.token_ids),
                                                                    scene.params)
        done: dict[str, RequestOutput] = {}
        for _ in range(3000):
            if not self.engine.has_work:
                break
            done |= {output.request_id: output for output in self.outputs.step() if output.finished}
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.cache.usage() == 0
        return [done[str(index)] for index in range(len(asked))]


@functools.cache
def reference(family: str) -> list[RequestOutput]:
    """Every scene alone by the torch backend on the CPU, with all log-probabilities of every position."""
    with ImageRig(family, enable_prefix_caching=False, max_num_seqs=1, overlap=False, max_logprobs=VOCAB) as rig:
        return [rig.run_scenes([scene])[0] for scene in with_logprobs(scenes(family), -1)]


def asks(family: str) -> list[Ask]:
    """Scenes as the comparison of tokens takes them."""
    return [Ask(list(output.prompt_token_ids or ()), scene.params)
            for output, scene in zip(reference(family), scenes(family), strict=True)]


@cells([("gemma4_unified", "none"), ("gemma4_unified", "ngram"), ("gemma4", "ngram"), ("gemma4_edge", "ngram"),
        ("gemma4_experts", "none"), ("qwen3_5", "none"), ("qwen3_5", "mtp"), ("qwen3_vl", "none"),
        ("qwen3_vl", "ngram")])
def test_tokens_equal_the_reference(family: str, drafter: str) -> None:
    tie = 10 * TIE if family == "qwen3_5" else TIE
    with SeeingRig(family, drafter) as rig:
        for is_second in (False, True):
            outputs = rig.see(scenes(family))
            assert_same_tokens(outputs, reference(family), asks(family), tie=tie)
            hits = sum(output.metrics.num_cached_tokens for output in outputs)
            assert hits > 0 or not is_second, "prefixes are found again, images among them"
        assert rig.num_poisoned > 0 and (drafter == "none" or rig.engine.stats.num_draft_tokens > 0)
        if HAS_CARD:
            reason = Uncaptured.SPANS if family in SPANS else Uncaptured.PROMPT_EMBEDS
            assert rig.runner.num_replays > 0, "steps that compute no image are captured"
            assert rig.engine.stats.uncaptured[reason] > 0


@cells([("gemma4_unified", "none"), ("qwen3_5", "mtp"), ("qwen3_vl", "none")])
def test_chunks_of_other_sizes_give_the_same_tokens(family: str, drafter: str) -> None:
    """Causal images are cut by small steps; an image seen in both directions needs a step of its size."""
    tie = 10 * TIE if family == "qwen3_5" else TIE
    with SeeingRig(family, drafter, max_num_batched_tokens=24 if family in SPANS else 13, max_num_seqs=3) as rig:
        assert_same_tokens(rig.see(scenes(family)), reference(family), asks(family), tie=tie)


@pytest.mark.gpu
@cells(EXACT, " exact")
def test_bits_are_those_of_the_request_alone(family: str, drafter: str) -> None:
    """bf16, exact mode: batch mates, chunks, hits and drafts leave no trace in a single bit."""
    asked = with_logprobs(scenes(family), 20)
    with SeeingRig(family, "none", dtype=torch.bfloat16, exact=True, enable_prefix_caching=False) as rig:
        alone = [bits_of(rig.see([scene])[0]) for scene in asked]
    with SeeingRig(family, drafter, dtype=torch.bfloat16, exact=True) as rig:
        for _ in range(2):
            assert [bits_of(output) for output in rig.see(asked)] == alone
        assert rig.engine.stats.num_draft_tokens > 0 and rig.engine.stats.num_hit_tokens > 0


@pytest.mark.gpu
@cells([("gemma4_unified", "none"), ("gemma4_edge", "none"), ("qwen3_5", "mtp"), ("qwen3_vl", "none")], " bf16")
def test_bf16_reads_the_same_picture(family: str, drafter: str) -> None:
    """The first token's scores are near those of float64, and nearer than those of another picture are."""
    asked = with_logprobs(scenes(family), VOCAB)
    with SeeingRig(family, drafter, dtype=torch.bfloat16) as rig:
        found = [first_scores(output) for output in rig.see(asked)]
    expected = [first_scores(output) for output in reference(family)]
    apart = torch.tensor([[float((one - other).square().mean().sqrt()) for other in expected] for one in found])
    own, others = apart[0, 0], apart[0, 2]  # the third scene has the same text with another first image
    assert own < 0.2 and own < others / 2, f"{own:.3f} from its own picture, {others:.3f} from another"


@pytest.mark.gpu
@cells([("gemma4_unified", "ngram"), ("qwen3_5", "mtp"), ("qwen3_vl", "ngram")], " planned")
def test_an_engine_plans_its_own_memory_and_sleeps(family: str, drafter: str) -> None:
    """From files to tokens as a user does it, with the tower loaded at the start; asleep in between."""
    settings = {name: value for name, value in SETTINGS.items() if name not in ("num_pages", "max_logprobs")}
    tie = 10 * TIE if family == "qwen3_5" else TIE
    prompts: list[Any] = [scene.prompt(family) for scene in scenes(family)]
    params: list[SamplingParams] = [scene.params for scene in scenes(family)]
    with LLM(str(folder_of(family)), dtype="float32", gpu_memory_utilization=0.5, limit_mm_per_prompt={"image": 3},
             speculative_config=DRAFTERS[drafter], skip_tokenizer_init=True, **settings) as llm:
        for level in (1, 2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert_same_tokens(outputs, reference(family), asks(family), tie=tie)
            llm.sleep(level)
            llm.wake_up()
        assert_same_tokens(llm.generate(prompts, params, use_tqdm=False), reference(family), asks(family), tie=tie)


def bits_of(output: RequestOutput) -> tuple[list[int], list[dict[int, float]]]:
    (sample,) = output.outputs
    assert sample.error is None
    return sample.token_ids, [{token: entry.logprob for token, entry in place.items()}
                              for place in sample.logprobs or []]


def first_scores(output: RequestOutput) -> torch.Tensor:
    (sample,) = output.outputs
    assert sample.error is None and sample.logprobs is not None
    return torch.tensor([sample.logprobs[0][token].logprob for token in range(VOCAB)], dtype=torch.float64)
