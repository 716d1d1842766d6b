"""GGUF files with the vision part of a model, written in the form of llama.cpp's converter from checkpoints that
transformers saved: the same tower, with the names of the gguf library's own table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from outrider.features.images.preprocess.processor import ImageProcessor
from outrider.models.sources import resolve
from outrider.models.sources.model_source import SourceError, WeightError
from outrider.models.vision.mmproj import read_projector
from outrider.models.vision.towers import build_tower, fill_tower, load_tower
from tests.models.test_vision_loading import patches_for
from tests.models.vision import save_vision

NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
ENDS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
UNIFIED = {"patch_dense": "v.patch_embd", "patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2",
           "pos_norm": "v.patch_norm.3"}  # the gguf library does not know them yet
LANGUAGES = {"gemma4_unified": "gemma4_text", "gemma4_clipped": "gemma4_text", "gemma4_standardized": "gemma4_text",
             "qwen3_5": "qwen3_5_text", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
ALL = pytest.mark.parametrize("name", LANGUAGES)
Named = Iterator[tuple[str, torch.Tensor]]
Files = Callable[[str], tuple[Path, Path]]


def written_name(name: str) -> str:
    found = NAMES.get_name(name, ENDS)
    assert found is not None, name
    return found


def colours_first(weight: torch.Tensor) -> torch.Tensor:
    side = round((weight.shape[-1] // 3) ** 0.5)
    return weight.unflatten(-1, (side, side, 3)).movedim(-1, -3)


def gemma(name: str, tensor: torch.Tensor) -> Named:
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    name += ".weight" if name.endswith("position_embedding_table") else ""
    if name.endswith("input_proj.weight"):
        tensor = colours_first(tensor)
    if name.endswith(("std_bias", "std_scale")):
        yield f"v.{name.rpartition('.')[2]}", tensor
        return
    # The table has q, k, v and o of this family with their last component alone.
    known = name.replace("_proj.", "_proj.linear.", 1) if "self_attn" in name else name
    yield written_name(known), tensor[None] if tensor.dim() == 0 else tensor


def unified(name: str, tensor: torch.Tensor) -> Named:
    part, _, end = name.removeprefix("model.vision_embedder.").partition(".")
    if part == "pos_embedding":
        yield "v.position_embd.weight", tensor.transpose(0, 1)
    elif part in UNIFIED:
        is_pixels = part == "patch_ln1" or name.endswith("patch_dense.weight")
        yield f"{UNIFIED[part]}.{end}", colours_first(tensor).flatten(-3) if is_pixels else tensor
    else:
        yield written_name(name), tensor


def qwen(name: str, tensor: torch.Tensor, taps: list[int]) -> Named:
    name = name.removeprefix("model.")
    stem, _, end = name.rpartition(".")
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif stem.startswith("visual.deepstack_merger_list."):
        index, part = stem.split(".")[2:]
        yield f"v.deepstack.{taps[int(index)]}.{part.removeprefix('linear_')}.{end}", tensor
    elif stem.startswith("visual.merger."):
        own = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[stem.rpartition(".")[2]]
        yield f"{own}.{end}", tensor
    else:
        yield written_name(name), tensor


def keys(writer: gguf.GGUFWriter, name: str, vision: dict[str, Any]) -> None:
    kind = "gemma4uv" if name == "gemma4_unified" else "gemma4v" if name.startswith("gemma") else "qwen3vl_merger"
    (writer.add_clip_projector_type if kind.startswith("qwen") else writer.add_clip_vision_projector_type)(kind)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_projection_dim(64)
    writer.add_vision_image_size(224)
    if name == "gemma4_unified":
        sizes = vision["mm_embed_dim"], 0, 0, 0
    else:
        sizes = (vision["hidden_size"], vision["intermediate_size"],
                 vision.get("num_hidden_layers") or vision["depth"], vision.get("num_attention_heads") or
                 vision["num_heads"])
    writer.add_vision_embedding_length(sizes[0])
    writer.add_vision_feed_forward_length(sizes[1])
    writer.add_vision_block_count(sizes[2])
    writer.add_vision_head_count(sizes[3])
    if kind == "qwen3vl_merger":
        writer.add_vision_spatial_merge_size(2)
        writer.add_vision_image_mean([0.5] * 3)
        writer.add_vision_image_std([0.5] * 3)
        taps = vision.get("deepstack_visual_indexes") or []
        writer.add_vision_is_deepstack_layers([index in taps for index in range(sizes[2])])


def write(path: Path, folder: Path, name: str, leave_out: str = "", more: dict[str, np.ndarray] | None = None,
          kinds: dict[str, Any] | None = None) -> Path:
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    keys(writer, name, vision)
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.startswith(("model.language_model.", "lm_head.")):
            continue
        if name == "gemma4_unified":
            made = unified(key, tensor)
        elif name.startswith("gemma4"):
            made = gemma(key, tensor)
        else:
            made = qwen(key, tensor, vision.get("deepstack_visual_indexes") or [])
        for own, value in made:
            if own != leave_out:
                writer.add_tensor(own, np.ascontiguousarray(value.numpy()))
    for own, numbers in ({"a.blk.0.ffn_up.weight": np.zeros((2, 2), np.float32)} | (more or {})).items():
        writer.add_tensor(own, numbers, raw_dtype=(kinds or {}).get(own))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("mmproj")

    @cache
    def made(name: str) -> tuple[Path, Path]:
        folder = save_vision(name, root / name)
        return folder, write(root / f"{name}.gguf", folder, name)

    return made


def language_of(name: str) -> dict[str, Any]:
    return {"model_type": LANGUAGES[name], "hidden_size": 64}


@ALL
def test_a_projector_file_gives_the_tower_of_the_folder(name: str, files: Files) -> None:
    folder, file = files(name)
    expected = load_tower(resolve(str(folder)), dtype=torch.float32, device="cpu")
    projector = read_projector(file)
    config = projector.model_config(language_of(name))
    assert config["model_type"] == resolve(str(folder)).config["model_type"]
    tower = build_tower(config, dtype=torch.float32, device="cpu")
    source: Any = projector
    fill_tower(tower, source)
    theirs = expected.weights()
    assert tower.weights().keys() == theirs.keys()
    assert all(torch.equal(slot.target, theirs[key].target) for key, slot in tower.weights().items())
    patches, grid = patches_for(tower, 3, 2)
    ours, other = tower.encode(patches, grid), expected.encode(patches, grid)
    assert torch.equal(ours.features, other.features) and len(ours.deepstack) == len(other.deepstack)
    processors = [ImageProcessor.from_config(config, projector.image_settings),
                  ImageProcessor.from_config(dict(resolve(str(folder)).config), None)]
    assert processors[0].size_of(300, 400) == processors[1].size_of(300, 400)


def test_what_does_not_fit_is_named(files: Files, tmp_path: Path) -> None:
    folder, file = files("qwen3_vl")
    projector = read_projector(file)
    with pytest.raises(SourceError, match="the language model is 'llama'"):
        projector.model_config({"model_type": "llama"})
    tower = build_tower(projector.model_config(language_of("qwen3_vl")), dtype=torch.float32, device="cpu")

    def fill(path: Path) -> None:
        source: Any = read_projector(path)
        fill_tower(tower, source)

    with pytest.raises(SourceError, match="tensor 'v.blk.0.extra.weight' is not part"):
        fill(write(tmp_path / "more", folder, "qwen3_vl", more={"v.blk.0.extra.weight": np.zeros(2, np.float32)}))
    with pytest.raises(SourceError, match=r"tensor 'v.patch_embd.weight.1' is missing"):
        fill(write(tmp_path / "frame", folder, "qwen3_vl", leave_out="v.patch_embd.weight.1"))
    with pytest.raises(WeightError, match="missing: model.visual.blocks.1.norm2.bias"):
        fill(write(tmp_path / "less", folder, "qwen3_vl", leave_out="v.blk.1.ln2.bias"))
    with pytest.raises(SourceError, match="'v.position_embd.weight' is missing"):
        read_projector(write(tmp_path / "table", folder, "qwen3_vl", leave_out="v.position_embd.weight")).model_config(
            language_of("qwen3_vl"))


@pytest.mark.parametrize(("architecture", "kind", "said"), [
    ("llama", "gemma4v", "architecture is 'llama'"), ("clip", "pixtral", "projector type 'pixtral'"),
    ("clip", None, "projector type None")])
def test_other_files_are_refused(architecture: str, kind: str | None, said: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "file", architecture)
    if kind is not None:
        writer.add_clip_projector_type(kind)
    writer.add_tensor("v.a", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match=said):
        read_projector(tmp_path / "file")


def test_transformers_own_names_of_the_unified_parts_are_read(files: Files) -> None:
    folder, _ = files("gemma4_unified")
    source: Any = resolve(str(folder))
    tower = build_tower(source.config, dtype=torch.float32, device="cpu")
    renamed = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        key = key.replace("embed_vision.", "embed_vision.multimodal_embedder.")
        renamed[key.replace("model.vision_embedder.", "model.embed_vision.")] = tensor

    class Renamed:
        path = folder

        def read(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from renamed.items()

    fill_tower(tower, Renamed())  # type: ignore[arg-type]
    expected = load_tower(source, dtype=torch.float32, device="cpu")
    assert all(torch.equal(slot.target, expected.weights()[key].target) for key, slot in tower.weights().items())


def test_quantised_matrices_are_read(files: Files, tmp_path: Path) -> None:
    folder, _ = files("qwen3_5")
    weight = load_file(folder / "model.safetensors")["model.visual.blocks.1.mlp.linear_fc2.weight"].numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    codes = gguf.quants.quantize(weight, kind)
    path = write(tmp_path / "codes", folder, "qwen3_5", leave_out="v.blk.1.ffn_down.weight",
                 more={"v.blk.1.ffn_down.weight": codes}, kinds={"v.blk.1.ffn_down.weight": kind})
    found = dict(read_projector(path).read())["model.visual.blocks.1.mlp.linear_fc2.weight"].numpy()
    assert np.array_equal(found, gguf.quants.dequantize(codes, kind)) and 0 < np.abs(found - weight).max() < 0.01
