"""Exact mode with images: the bits of a request do not depend on batch mates, chunks or prefix hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from outrider import LLM, SamplingParams
from outrider.core.outputs import RequestOutput
from outrider.kernels import cpu as native
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


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4_edge"])
def test_bits_do_not_depend_on_others(family: str) -> None:
    with LLM(str(folder_of(family)), **SETTINGS) as llm:
        alone = bits(llm.generate([prompt(family, 1, 20)], PARAMS, use_tqdm=False))[0]
        mixed = bits(llm.generate([prompt(family, 2, 7), prompt(family, 1, 20), prompt(family, 3, 30)], PARAMS,
                                  use_tqdm=False))
    assert mixed[1] == alone and mixed[0] != alone != mixed[2]


def test_images_seen_both_ways_are_refused() -> None:
    with LLM(str(folder_of("gemma4_unified")), **SETTINGS) as llm:
        with pytest.raises(ValueError, match="images of this model are not served with exact=True"):
            llm.generate([prompt("gemma4_unified", 1, 20)], PARAMS, use_tqdm=False)
