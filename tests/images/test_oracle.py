"""Models that see against transformers: logits of prompts and answers, and greedy text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.features.images.preprocess.processor import ImageProcessor
from outrider.features.images.reader import expanded
from tests.images.recipes import (
    AUDIO,
    BEGIN,
    END,
    PROCESSOR_CONFIG,
    RECIPES,
    SOFT,
    VIDEO,
    Recipe,
    allow_small_budget,
    prepared,
)

ALL = pytest.mark.parametrize("family", RECIPES)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("seeing")

    @cache
    def save(family: str) -> Path:
        folder = RECIPES[family].save(root / family)
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR_CONFIG[kind]))
        if suppressed_of(kind):
            (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed_of(kind)}))
        return folder

    return save


@pytest.fixture(scope="module")
def theirs(folder_of: Folders) -> Callable[[str], Any]:
    @cache
    def load(family: str) -> Any:
        import transformers

        made = getattr(transformers, RECIPES[family].model_class)
        return made.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation="eager").eval()

    return load


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


def suppressed_of(kind: str) -> list[int]:
    """The tokens that models of this type must not write, by their generation config."""
    return [SOFT, BEGIN, END, VIDEO, AUDIO] if kind.startswith("gemma4") else []


def prompt_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, 290, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def scene(recipe: Recipe, before: int, gaps: Sequence[int]) -> tuple[list[int], list[np.ndarray]]:
    """A prompt with one placeholder for each image, with `before` tokens before the first one and `gaps` behind
    each."""
    ids = prompt_of(before, before)
    for index, gap in enumerate(gaps):
        ids += [*recipe.place, *prompt_of(50 + index, gap)]
    return ids, [recipe.image(index, recipe.shapes[index]) for index in range(len(gaps))]


SCENES = {"one": (5, (4,)), "first": (1, (9,)), "page edge": (15, (3, 7)), "beside": (12, (0, 5)),
          "three": (31, (1, 17, 2))}


@ALL
@pytest.mark.parametrize("name", SCENES)
def test_logits_and_text_equal_transformers(folder_of: Folders, theirs: Callable[[str], Any], family: str,
                                            name: str) -> None:
    recipe, folder, model = RECIPES[family], folder_of(family), theirs(family)
    config = json.loads((folder / "config.json").read_text())
    ids, images = scene(recipe, *SCENES[name])
    ready = prepared(config, images)
    kind = config["model_type"]
    processor = ImageProcessor.from_config(config, PROCESSOR_CONFIG[kind])
    known = expanded(ids, SOFT, [processor.placeholder_ids(image.grid) for image in ready])
    prompt_len = len(known)

    def logits() -> torch.Tensor:
        forbidden = torch.tensor(suppressed_of(kind), dtype=torch.int64)
        return recipe.logits(model, known, ready).index_fill(1, forbidden, -torch.inf)

    for _ in range(6):
        known.append(int(logits()[-1].argmax()))
    scores = logits().log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=320, prompt_logprobs=320, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, max_logprobs=320,
             num_pages=64, skip_tokenizer_init=True) as llm:
        given: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        (output,) = llm.generate([given], params, use_tqdm=False)
        (again,) = llm.generate([given | {"prompt_token_ids": known[:prompt_len]}],
                                SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == known[:prompt_len]
    assert output.outputs[0].token_ids == again.outputs[0].token_ids == known[prompt_len:]
    assert again.metrics.num_cached_tokens > 0 or name != "three"
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    for position, entry in enumerate([*output.prompt_logprobs, *output.outputs[0].logprobs]):
        is_soft = position < prompt_len and known[position] == SOFT
        assert (entry is None) == (is_soft or position == 0)
        if entry is not None:
            found = torch.tensor([entry[token].logprob for token in range(320)])
            torch.testing.assert_close(found, scores[position - 1], rtol=0, atol=1e-4)
