"""A GGUF file with the vision part of a model ("mmproj"), in the form of llama.cpp's converter.

The file has its own metadata and names. `ProjectorFile` reads them as the `vision_config`, the image settings and the
tensors that the same model has as a Hugging Face folder. Parts for sound are ignored. Torch is imported only when
tensors are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.core.fields import shown
from outrider.models.sources.gguf_header import Header, TensorEntry, read_header
from outrider.models.sources.gguf_tensors import FLOAT_KINDS, KINDS, dequantised, raw_bytes
from outrider.models.sources.model_source import SourceError

if TYPE_CHECKING:
    import torch

SOUND = ("a.", "mm.a.")  # what the names of tensors for sound begin with
FOLDER = "Use the model's safetensors folder instead"
EPS, DAMAGED = 1e-6, "the file is damaged or incomplete: fetch it again"

Rename = Callable[[str], str | None]


class VisionKeys:
    """Typed reads of a projector file's metadata below `clip.vision`."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"clip.vision.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            what = "is missing" if value is None else f"is {shown(value)}"
            raise SourceError(f"{self.header.path}: metadata clip.vision.{key} {what}; {DAMAGED}")
        return value

    def flags(self, key: str) -> list[int]:
        """Return the indices at which a list of flags is set."""
        value = self.get(key, [])
        if not isinstance(value, list):
            raise SourceError(f"{self.header.path}: metadata clip.vision.{key} is {shown(value)}; {DAMAGED}")
        return [index for index, flag in enumerate(value) if flag]

    def axis(self, tensor: str, axis: int) -> int:
        """Return a size of a tensor."""
        entry = self.header.tensors.get(tensor)
        if entry is None or axis >= len(entry.shape):
            raise SourceError(f"{self.header.path}: tensor {shown(tensor)} is missing or has another shape; {DAMAGED}")
        return entry.shape[axis]

    def must_have_eps(self) -> None:
        """Refuse an epsilon of norms other than the one that all these families have."""
        eps = self.get("attention.layer_norm_epsilon", EPS)
        if not isinstance(eps, float) or abs(eps - EPS) > EPS / 100:
            raise SourceError(f"{self.header.path}: metadata clip.vision.attention.layer_norm_epsilon is {shown(eps)}, "
                              f"and only {EPS} is supported. {FOLDER}")


class Projector(NamedTuple):
    """A kind of projector file, such as that of Qwen3-VL: how to read its metadata and tensors."""

    vision_config: Callable[[VisionKeys], dict[str, Any]]
    names: Callable[[VisionKeys], Rename]  # the model's name of a tensor of the file, or None if it has none
    languages: Mapping[str, str]  # the `model_type` of a language model -> the whole model's
    changes: Mapping[str, Callable[..., torch.Tensor]]  # of tensors, by the model's name
    joined: Mapping[str, str] = {}  # a tensor of the file -> the one that is stored beside it


@dataclass(frozen=True)
class ProjectorFile:
    header: Header
    projector: Projector

    @property
    def path(self) -> Path:
        return self.header.path

    def model_config(self, language: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of the whole model. language: the language model's config, from its own file."""
        kind = self.projector.languages.get(str(language.get("model_type")))
        if kind is None:
            raise SourceError(f"{self.path} belongs to a model with one of {', '.join(self.projector.languages)}, and "
                              f"the language model is {shown(language.get('model_type'))}: give the file that was "
                              "published beside it")
        vision = self.projector.vision_config(VisionKeys(self.header))
        return {"model_type": kind, "text_config": dict(language), "vision_config": vision}

    @property
    def image_settings(self) -> dict[str, Any]:
        """Return the file's settings of preprocessing, under the keys of preprocessor_config.json."""
        keys = {"image_mean": "image_mean", "image_std": "image_std", "min_pixels": "image_min_pixels",
                "max_pixels": "image_max_pixels"}
        found = {own: VisionKeys(self.header).get(key) for own, key in keys.items()}
        return {key: value for key, value in found.items() if value is not None}

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the vision tensors one at a time, dequantised, under their names in a Hugging Face folder."""
        rename, joined = self.projector.names(VisionKeys(self.header)), self.projector.joined
        for entry in self.header.tensors.values():
            if entry.name.startswith(SOUND) or entry.name in joined.values():
                continue
            name = rename(entry.name)
            if name is None:
                raise SourceError(f"{self.path}: tensor {shown(entry.name)} is not part of this kind of vision model "
                                  f"as Outrider knows it. {FOLDER}")
            change, parts = self.projector.changes.get(name), [self._numbers(entry)]
            if entry.name in joined:
                parts.append(self._numbers(self._entry(joined[entry.name])))
            yield name, parts[0] if change is None else change(*parts)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.header.tensors:
            raise SourceError(f"{self.path}: tensor {shown(name)} is missing; {DAMAGED}")
        return self.header.tensors[name]

    def _numbers(self, entry: TensorEntry) -> torch.Tensor:
        import torch

        from outrider.models.sources.gguf_weights import FLOATS

        if entry.kind.name not in KINDS:
            raise SourceError(f"{self.path}: tensor {shown(entry.name)} is {entry.kind.name}, which is not supported; "
                              f"supported: {', '.join(KINDS)}. Use a file in one of these types")
        raw = raw_bytes(self.header, entry)
        if entry.kind.name in FLOAT_KINDS:
            return torch.from_numpy(raw).view(FLOATS[entry.kind.name]).view(entry.shape)
        return torch.from_numpy(dequantised(raw.reshape(*entry.shape[:-1], -1), entry.kind)).view(entry.shape)


def read_projector(path: Path, *, maps_file: bool = True) -> ProjectorFile:
    """Read the header of a projector file. Raises a SourceError that names an unsupported value."""
    header = read_header(path, maps_file=maps_file)
    meta = header.metadata
    if meta.get("general.architecture") != "clip":
        raise SourceError(f"{path} is not the vision part of a model: its architecture is "
                          f"{shown(meta.get('general.architecture'))} instead of 'clip'. Give the mmproj file")
    kind = meta.get("clip.vision.projector_type", meta.get("clip.projector_type"))
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise SourceError(f"{path}: projector type {shown(kind)} is not supported; supported: "
                          f"{', '.join(PROJECTORS)}. {FOLDER}")
    return ProjectorFile(header, PROJECTORS[kind])


def renaming(fixed: Mapping[str, str], in_layer: Mapping[str, str], layers: str) -> Rename:
    """Return a function that renames tensors by two tables of names without their last component. in_layer: names below
    `v.blk.N`; layers: the name that replaces `v.blk.N`, with {} for N."""

    def rename(name: str) -> str | None:
        if name in fixed:
            return fixed[name]
        stem, _, end = name.rpartition(".")
        if stem in fixed:
            return f"{fixed[stem]}.{end}"
        found = re.fullmatch(r"v\.blk\.(\d+)\.(.+)", stem)
        if found is None or found[2] not in in_layer:
            return None
        # A clipped product holds its matrix one level lower than the bounds beside it.
        own = in_layer[found[2]]
        own = own.removesuffix(".linear") if end.endswith(("_min", "_max")) else own
        return f"{layers.format(found[1])}.{own}.{end}"

    return rename


def gemma4_config(keys: VisionKeys) -> dict[str, Any]:
    keys.must_have_eps()
    size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    return {
        "hidden_size": size, "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"), "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads, "head_dim": size // num_heads, "patch_size": keys.size("patch_size"),
        "pooling_kernel_size": keys.size("projector.scale_factor", 3),
        "position_embedding_size": keys.axis("v.position_embd.weight", 1),
        "use_clipped_linears": any(name.startswith("v.") and name.endswith(".input_max")
                                   for name in keys.header.tensors),
        "standardize": any(name.startswith("v.std_scale") for name in keys.header.tensors),
    }


def gemma4_unified_config(keys: VisionKeys) -> dict[str, Any]:
    keys.must_have_eps()
    size = keys.size("embedding_length")
    return {"patch_size": keys.size("patch_size"), "pooling_kernel_size": keys.size("projector.scale_factor", 3),
            "mm_embed_dim": size, "output_proj_dims": size,
            "mm_posemb_size": keys.axis("v.position_embd.weight", 1)}


def qwen_config(keys: VisionKeys) -> dict[str, Any]:
    keys.must_have_eps()
    return {"depth": keys.size("block_count"), "hidden_size": keys.size("embedding_length"),
            "intermediate_size": keys.size("feed_forward_length"), "num_heads": keys.size("attention.head_count"),
            "patch_size": keys.size("patch_size"), "spatial_merge_size": keys.size("spatial_merge_size", 2),
            "temporal_patch_size": 2, "num_position_embeddings": keys.axis("v.position_embd.weight", 0),
            "deepstack_visual_indexes": keys.flags("is_deepstack_layers")}


def gemma4_names(keys: VisionKeys) -> Rename:
    tower = "model.vision_tower"
    fixed = {"v.patch_embd": f"{tower}.patch_embedder.input_proj",
             "v.position_embd.weight": f"{tower}.patch_embedder.position_embedding_table",
             "mm.input_projection": "model.embed_vision.embedding_projection"}
    for name in ("std_bias", "std_scale"):
        fixed |= {f"v.{name}": f"{tower}.{name}", f"v.{name}.weight": f"{tower}.{name}"}
    attention = {f"attn_{part}": f"self_attn.{part[0]}_proj.linear" for part in ("q", "k", "v", "out")}
    mlp = {f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")}
    norms = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ln1": "input_layernorm",
             "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
             "ffn_post_norm": "post_feedforward_layernorm"}
    return renaming(fixed, attention | mlp | norms, f"{tower}.encoder.layers.{{}}")


def gemma4_unified_names(keys: VisionKeys) -> Rename:
    own = "model.vision_embedder"
    fixed = {"v.patch_embd": f"{own}.patch_dense", "v.patch_norm.1": f"{own}.patch_ln1",
             "v.patch_norm.2": f"{own}.patch_ln2", "v.patch_norm.3": f"{own}.pos_norm",
             "v.position_embd.weight": f"{own}.pos_embedding",
             "mm.input_projection": "model.embed_vision.embedding_projection"}
    return renaming(fixed, {}, "")


def qwen_names(keys: VisionKeys) -> Rename:
    fixed = {"v.patch_embd": "model.visual.patch_embed.proj", "v.position_embd": "model.visual.pos_embed",
             "v.post_ln": "model.visual.merger.norm", "mm.0": "model.visual.merger.linear_fc1",
             "mm.2": "model.visual.merger.linear_fc2"}
    for index, block in enumerate(keys.flags("is_deepstack_layers")):
        own = f"model.visual.deepstack_merger_list.{index}"
        fixed |= {f"v.deepstack.{block}.norm": f"{own}.norm", f"v.deepstack.{block}.fc1": f"{own}.linear_fc1",
                  f"v.deepstack.{block}.fc2": f"{own}.linear_fc2"}
    in_layer = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
                "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
    return renaming(fixed, in_layer, "model.visual.blocks.{}")


def colours_last(weight: torch.Tensor) -> torch.Tensor:
    """Reorder the weight of a layer over patches, [.., numbers of a patch], from (colour, row, column) to (row, column,
    colour)."""
    pixels = weight.shape[-1] // 3
    return weight.unflatten(-1, (3, pixels)).transpose(-1, -2).flatten(-2)


def join_frames(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Join the patch embedding's weights for two frames, [hidden, 3, side, side] each: [hidden, 3, 2, side, side]."""
    import torch

    return torch.stack((first, second), dim=2)


_UNIFIED = "model.vision_embedder"
PROJECTORS = {
    "gemma4v": Projector(gemma4_config, gemma4_names, {"gemma4_text": "gemma4"}, {
        "model.vision_tower.patch_embedder.input_proj.weight": lambda weight: colours_last(weight.flatten(1))}),
    "gemma4uv": Projector(
        gemma4_unified_config, gemma4_unified_names,
        {"gemma4_text": "gemma4_unified", "gemma4_unified_text": "gemma4_unified"}, {
            f"{_UNIFIED}.patch_dense.weight": lambda weight: colours_last(weight.flatten(1)),
            f"{_UNIFIED}.patch_ln1.weight": colours_last, f"{_UNIFIED}.patch_ln1.bias": colours_last,
            f"{_UNIFIED}.pos_embedding": lambda table: table.transpose(0, 1)}),
    "qwen3vl_merger": Projector(
        qwen_config, qwen_names,
        {"qwen3": "qwen3_vl", "qwen3_moe": "qwen3_vl_moe", "qwen3_5_text": "qwen3_5",
         "qwen3_5_moe_text": "qwen3_5_moe"},
        {"model.visual.patch_embed.proj.weight": join_frames}, {"v.patch_embd.weight": "v.patch_embd.weight.1"}),
}
