"""New weights reach the vision tower, and no feature that older ones have encoded survives them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from outrider import LLM, SamplingParams
from outrider.core.weights_checksum import WeightsChecksum
from outrider.formats import WeightSlot
from outrider.models.sources.model_source import WeightError
from outrider.runner.commands import WeightsIncomplete
from tests.images.recipes import RECIPES, allow_small_budget
from tests.images.rig import folder_of

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 2,
                            "num_pages": 64, "skip_tokenizer_init": True}
FAMILIES = ("gemma4_unified", "gemma4_edge", "qwen3_vl", "qwen3_5")


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_small_budget(monkeypatch)


def is_of_tower(name: str) -> bool:
    return name.startswith(("model.visual.", "model.vision", "model.embed_vision."))


def changed_tower(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model, with other numbers in the matrices of its tower; saved in `folder` too."""
    shutil.copytree(folder_of(family), folder)
    tensors = load_file(folder / "model.safetensors")
    found = {name: own * 1.5 if is_of_tower(name) and own.dim() > 1 else own for name, own in tensors.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return found


def seen(llm: LLM, family: str) -> list[tuple[int, float]]:
    recipe = RECIPES[family]
    prompt = {"prompt_token_ids": [5, 6, *recipe.place, 7], "multi_modal_data": {
        "image": recipe.image(1, recipe.shapes[0])}}
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True),
                             use_tqdm=False)
    (sample,) = output.outputs
    assert sample.logprobs is not None
    return [(token, entry[token].logprob) for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_replaces_the_weights_of_the_tower(family: str, tmp_path: Path) -> None:
    tensors = changed_tower(family, tmp_path / "other")
    with LLM(str(tmp_path / "other"), **SETTINGS) as llm:
        theirs = seen(llm, family)
    with LLM(str(folder_of(family)), **SETTINGS) as llm:
        ours = seen(llm, family)
        assert ours != theirs == seen_after(llm, family, tensors)
        llm.sleep(1)
        llm.wake_up()
        assert seen(llm, family) == theirs
        llm.sleep(2)
        llm.wake_up()
        assert seen(llm, family) == ours, "all weights were read from the files again"
        llm.start_weight_update()
        llm.load_weights(tensors)
        llm.finish_weight_update()
        assert seen(llm, family) == theirs
        assert seen_after(llm, family, folder_of(family)) == ours
        parts = {name: own for name, own in tensors.items() if is_of_tower(name)}
        assert seen_after(llm, family, parts) == theirs, "the tower's alone"


@pytest.mark.parametrize("family", ["gemma4_unified", "qwen3_vl"])
def test_an_update_may_come_before_the_first_image(family: str, tmp_path: Path) -> None:
    changed_tower(family, tmp_path / "other")
    with LLM(str(tmp_path / "other"), **SETTINGS) as llm:
        theirs = seen(llm, family)
    model = getattr(transformers, RECIPES[family].model_class).from_pretrained(tmp_path / "other")
    with LLM(str(folder_of(family)), **SETTINGS) as llm:
        assert seen_after(llm, family, model.named_parameters()) == theirs, "by the names of transformers"


def test_a_tensor_that_no_tower_has_is_refused_by_name() -> None:
    with LLM(str(folder_of("qwen3_vl")), **SETTINGS) as llm:
        ours = seen(llm, "qwen3_vl")
        with pytest.raises(WeightError, match="no weights of these names: model.visual.blocks.9.norm1.weight"):
            llm.update_weights({"model.visual.blocks.9.norm1.weight": torch.ones(48)})
        assert seen(llm, "qwen3_vl") == ours


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl"])
def test_a_tower_of_two_versions_waits_for_all_its_weights(family: str, streams: bool, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = changed_tower(family, tmp_path / "other")
    text = {name: own for name, own in tensors.items() if not is_of_tower(name)}
    tower = {name: own for name, own in tensors.items() if is_of_tower(name)}
    with LLM(str(tmp_path / "other"), **SETTINGS) as llm:
        theirs = seen(llm, family)

    def update(weights: Any) -> None:
        if not streams:
            return llm.update_weights(weights)
        llm.start_weight_update()
        llm.load_weights(weights)
        llm.finish_weight_update()

    with LLM(str(folder_of(family)), **SETTINGS) as llm:
        ours, store, left = seen(llm, family), WeightSlot.store, 5

        def fail_half_way(slot: WeightSlot, tensor: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise RuntimeError("the device has lost its mind")
            store(slot, tensor)

        with monkeypatch.context() as patched:
            patched.setattr(WeightSlot, "store", fail_half_way)
            with pytest.raises(WeightsIncomplete, match="lost its mind"):
                update(tower)
        with pytest.raises((WeightError, WeightsIncomplete), match="lacks model.(visual|embed_vision)"):
            update(text)
        assert llm.engine.pause.is_on
        update(tensors)
        assert seen(llm, family) == theirs
        update(text)
        assert seen(llm, family) == theirs != ours, "later the text alone will do again"


@pytest.mark.parametrize("family", FAMILIES)
def test_checksums_cover_the_tower(family: str, tmp_path: Path) -> None:
    tensors = changed_tower(family, tmp_path / "other")
    with LLM(str(folder_of(family)), **SETTINGS) as llm:
        before = llm.weights_checksum()
        assert_those_of(before, load_file(folder_of(family) / "model.safetensors"))
        seen(llm, family)
        assert llm.weights_checksum() == before
        llm.update_weights(tensors)
        assert_those_of(llm.weights_checksum(), tensors)
        changed = before.differences({name: own.sha256 for name, own in llm.weights_checksum().tensors.items()})
        assert changed and all(map(is_of_tower, changed))
    with LLM(str(folder_of(family)), limit_mm_per_prompt={"image": 0}, **SETTINGS) as llm:
        assert not any(map(is_of_tower, llm.weights_checksum().tensors)), "a tower that is never loaded has none"


def assert_those_of(found: WeightsChecksum, tensors: dict[str, torch.Tensor]) -> None:
    own = {name: hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()
           for name, tensor in tensors.items() if is_of_tower(name)}
    assert own and {name: found.tensors[name].sha256 for name in own} == own


def seen_after(llm: LLM, family: str, weights: Any) -> list[tuple[int, float]]:
    llm.update_weights(weights)
    return seen(llm, family)
