"""A GGUF file of a language model with the file of its vision part beside it sees as the model's folder does."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.features.images.model_limits import read_processor_config
from outrider.models.sources import resolve
from tests.images.recipes import RECIPES, SOFT, VOCAB, allow_small_budget
from tests.images.rig import folder_of
from tests.models import gguf_files, test_vision_mmproj
from tests.models.gguf_files import ARCH, Config, Written

THERE, HERE = "model.language_model.", "model."
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 2,
                            "num_pages": 64, "skip_tokenizer_init": True, "max_logprobs": VOCAB}


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


def tokens(writer: gguf.GGUFWriter) -> None:
    names = {SOFT: "<|image|>" if writer.arch == "gemma4" else "<|image_pad|>", 301: "<|image>", 302: "<image|>"}
    writer.add_token_list([names.get(token, f"t{token}") for token in range(VOCAB)])


def gemma_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    gguf_files.gemma4_keys(writer, config)
    tokens(writer)


def qwen_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    writer.add_num_deepstack_layers(2)
    tokens(writer)


def hybrid_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    gguf_files.delta_keys(writer, config)
    for key, value in (("rope.dimension_count", 16), ("rope.dimension_sections", [4, 2, 2, 0])):
        del writer.kv_data[0][f"{writer.arch}.{key}"]
        add = writer.add_rope_dimension_count if isinstance(value, int) else writer.add_rope_dimension_sections
        add(value)  # type: ignore[arg-type]
    tokens(writer)


# family -> (how its language model is converted, the name of its vision part's form)
FILES: dict[str, tuple[Written, str]] = {
    "gemma4": (Written("", ARCH.GEMMA4, {}, gemma_keys, gguf_files.convert_gemma4), "gemma4_standardized"),
    "gemma4_edge": (Written("", ARCH.GEMMA4, {}, gemma_keys, gguf_files.convert_gemma4), "gemma4_clipped"),
    "gemma4_unified": (Written("", ARCH.GEMMA4, {}, gemma_keys, gguf_files.convert_gemma4), "gemma4_unified"),
    "qwen3_vl": (Written("", ARCH.QWEN3VL, {}, qwen_keys), "qwen3_vl"),
    "qwen3_5": (Written("", ARCH.QWEN35, {}, hybrid_keys, gguf_files.convert_tiled_delta), "qwen3_5"),
}


def folder_like(files: Path, family: str, path: Path) -> Path:
    """The family's folder with the numbers of the files, whose matrices have 8 bits."""
    shutil.copytree(folder_of(family), path)
    given, own = load_file(path / "model.safetensors"), dict(resolve(files / "model.gguf").tensors())
    tied = {"lm_head.weight"} - given.keys()
    assert own.keys() | tied == given.keys() | tied
    for name, tensor in own.items():
        torch.testing.assert_close(tensor.view(given[name].shape), given[name], rtol=0.02, atol=0.02)
    save_file({name: tensor.view(given[name].shape).contiguous() for name, tensor in own.items() if name in given},
              path / "model.safetensors", {"format": "pt"})
    return path


def write_files(family: str, folder: Path, path: Path) -> Path:
    """Both GGUF files of a model."""
    language = path / "language"
    language.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (language / "config.json").write_text(json.dumps(config))
    own = {name.replace(THERE, HERE): tensor for name, tensor in load_file(folder / "model.safetensors").items()
           if name.startswith((THERE, "lm_head."))}
    save_file(own, language / "model.safetensors", {"format": "pt"})
    written, form = FILES[family]
    gguf_files.write(path / "model.gguf", language, written)
    shutil.rmtree(language)
    test_vision_mmproj.write(path / "mmproj-model-f32.gguf", folder, form)
    return path


def seen(model: Path, family: str, **settings: Any) -> torch.Tensor:
    recipe = RECIPES[family]
    prompt: Any = {"prompt_token_ids": [5, 6, *recipe.place, *range(7, 20)],
                   "multi_modal_data": {"image": recipe.image(1, recipe.shapes[0])}}
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=VOCAB, ignore_eos=True)
    with LLM(str(model), **SETTINGS | settings) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    entries = output.outputs[0].logprobs or []
    return torch.tensor([[entry[token].logprob for token in range(VOCAB)] for entry in entries])


@pytest.mark.parametrize("family", FILES)
def test_two_files_see_what_the_folder_sees(family: str, tmp_path: Path) -> None:
    files = write_files(family, folder_of(family), tmp_path / "files")
    folder = folder_like(files, family, tmp_path / "hf")
    expected = seen(folder, family)
    for name in ("model.gguf", "."):
        shutil.copy(folder / "preprocessor_config.json", files)
        found = seen(files / name, family, keep_quantized=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_vision_part_says_how_images_are_prepared(tmp_path: Path) -> None:
    files = write_files("qwen3_vl", folder_of("qwen3_vl"), tmp_path / "files")
    assert read_processor_config(files / "model.gguf") == {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert read_processor_config(tmp_path / "config.json") is None


def test_parts_that_do_not_fit_leave_the_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_files("qwen3_vl", folder_of("qwen3_vl"), tmp_path / "files")
    assert resolve(files / "model.gguf").config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    shutil.copy(files / "mmproj-model-f32.gguf", files / "other-mmproj.gguf")
    with caplog.at_level(logging.WARNING):
        assert resolve(files / "model.gguf").config["architectures"] == ["Qwen3ForCausalLM"]
        assert "several vision parts (mmproj-model-f32.gguf, other-mmproj.gguf)" in caplog.text
        (files / "other-mmproj.gguf").unlink()
        test_vision_mmproj.write(files / "mmproj-model-f32.gguf", folder_of("gemma4"), "gemma4_standardized")
        assert resolve(files).config["architectures"] == ["Qwen3ForCausalLM"]
        assert "the language model is 'qwen3'" in caplog.text
    prompt: Any = {"prompt_token_ids": [5], "multi_modal_data": {"image": RECIPES["qwen3_vl"].image(1, (2, 3))}}
    with LLM(str(files / "model.gguf"), **SETTINGS) as llm:
        with pytest.raises(ValueError, match="is served without images"):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
