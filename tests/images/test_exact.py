"""Exact mode with images: the bits of a request do not depend on batch mates, chunks or prefix hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from outrider import LLM, SamplingParams
from outrider.core.outputs import RequestOutput
from outrider.kernels import cpu as native
from outrider.mixers.paged.native_backend import NativeBackend
from outrider.mixers.paged.range_backend import NativeRanges
from tests.images.recipes import RECIPES, allow_small_budget
from tests.images.rig import folder_of

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "exact": True, "max_model_len": 128, "num_pages": 64,
                            "max_num_seqs": 4, "max_num_batched_tokens": 24, "skip_tokenizer_init": True}
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


def prompt(family: str, seed: int, length: int) -> Any:
    recipe = RECIPES[family]
    return {"prompt_token_ids": [*range(5, 5 + length), *recipe.place, *range(40, 50)],
            "multi_modal_data": {"image": recipe.image(seed, recipe.shapes[0])}}


def bits(outputs: Sequence[RequestOutput]) -> list[list[float]]:
    samples = [output.outputs[0] for output in outputs]
    return [[entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs or (), strict=True)]
            for own in samples]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4_edge", "gemma4_unified", "gemma4_experts"])
def test_bits_do_not_depend_on_others(family: str) -> None:
    with LLM(str(folder_of(family)), **SETTINGS) as llm:
        alone = bits(llm.generate([prompt(family, 1, 20)], PARAMS, use_tqdm=False))[0]
        mixed = bits(llm.generate([prompt(family, 2, 7), prompt(family, 1, 20), prompt(family, 3, 30)], PARAMS,
                                  use_tqdm=False))
    assert mixed[1] == alone and mixed[0] != alone != mixed[2]


@pytest.mark.parametrize("family", ["gemma4_unified", "gemma4"])
def test_images_seen_both_ways_have_one_result(family: str) -> None:
    """Over steps of other sizes, prefix hits that end before and behind an image, lookups, and padding."""
    asked = [prompt(family, seed, length) for seed, length in ((1, 20), (1, 20), (2, 20), (1, 3), (4, 33))]
    for index in (1, 4):
        asked[index] = asked[index] | {"prompt_token_ids": [*asked[index]["prompt_token_ids"], *range(60, 75)]}
    cold = SETTINGS | {"enable_prefix_caching": False, "max_num_batched_tokens": 128}
    with LLM(str(folder_of(family)), **cold) as llm:
        expected = [bits(llm.generate([own], PARAMS, use_tqdm=False))[0] for own in asked]
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    for options in ({}, {"max_num_batched_tokens": 11, "max_num_seqs": 2}, {"speculative_config": lookup}):
        with LLM(str(folder_of(family)), **SETTINGS | options) as llm:
            for is_second in (False, True):
                outputs = llm.generate(asked, PARAMS, use_tqdm=False)
                assert bits(outputs) == expected
                hits = sum(output.metrics.num_cached_tokens for output in outputs)
                assert hits > 0 or not is_second
    assert len({tuple(own) for own in expected}) == 5


def test_rows_with_ranges_have_the_bits_of_rows_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without images has the same bits in a step with another one's image: its attention goes another way
    there."""
    text = {"prompt_token_ids": [*range(100, 121)]}
    calls: list[int] = []
    attend = NativeRanges._attend

    def counted(self: NativeRanges, *args: Any) -> Any:
        calls.append(len(args[2]))
        return attend(self, *args)

    monkeypatch.setattr(NativeRanges, "_attend", counted)
    with LLM(str(folder_of("gemma4_unified")), **SETTINGS | {"max_num_batched_tokens": 128}) as llm:
        alone = bits(llm.generate([text], PARAMS, use_tqdm=False))[0]
        assert not calls
        mixed = bits(llm.generate([text, prompt("gemma4_unified", 1, 9)], PARAMS, use_tqdm=False))
        assert mixed[0] == alone and max(calls) > 21


def test_images_seen_both_ways_are_refused_where_no_kernel_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeBackend, "has_exact_ranges", False)
    with LLM(str(folder_of("gemma4_unified")), **SETTINGS) as llm:
        with pytest.raises(ValueError, match="images of this model are not served with exact=True"):
            llm.generate([prompt("gemma4_unified", 1, 20)], PARAMS, use_tqdm=False)
