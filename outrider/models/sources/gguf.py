"""A GGUF file as a model source: its metadata as a Hugging Face config, its tensors under Hugging Face names.

Unsupported settings are refused by their key or tensor name. The tokenizer's metadata is passed on without being read
here. Torch is imported only when weights are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.core.fields import Range, check_value, shown
from outrider.models.sources.gguf_families import FAMILIES, Family
from outrider.models.sources.gguf_header import Header, TensorEntry, read_header
from outrider.models.sources.gguf_metadata import Metadata
from outrider.models.sources.gguf_places import TensorPlace
from outrider.models.sources.gguf_tensors import FLOAT_KINDS, KEPT_KINDS, KINDS
from outrider.models.sources.model_source import ModelSource, SourceError

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight


@dataclass(frozen=True)
class GgufSource(ModelSource):
    header: Header

    @property
    def family(self) -> Family:
        return FAMILIES[self.header.metadata["general.architecture"]]

    def tensor_names(self) -> set[str]:
        return set(self._placed)

    def stored_format(self, name: str) -> StoredFormat | None:
        from outrider.formats import StoredFormat, TransposedHeads

        place, entry = self._placed.get(f"{name}.weight", (None, None))
        if place is None or entry is None or entry.kind.name not in KEPT_KINDS or place.change is not None:
            return None
        grid = None if place.columns is None else place.columns(Metadata(self.header))
        return StoredFormat(entry.kind.name) if grid is None else TransposedHeads(entry.kind.name, *grid)

    @cached_property
    def _placed(self) -> dict[str, tuple[TensorPlace, TensorEntry]]:
        """Map the name of each tensor of the model to its place and to the tensor of the file that fills it."""
        num_layers = Metadata(self.header).num_layers
        return {place.name.replace("{expert}", str(expert)): (place, entry) for entry in self.header.tensors.values()
                for place in self.family.places(entry.name, num_layers) or ()
                for expert in range(entry.shape[0] if "{expert}" in place.name else 1)}

    def read(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        from outrider.models.sources.gguf_weights import read_tensors

        return read_tensors(self.header, self.family)

    def tokenizer(self) -> dict[str, Any]:
        return self.header.metadata


def gguf_source(path: Path, name: str | None = None, *, maps_file: bool = True) -> ModelSource:
    header = read_header(path, maps_file=maps_file)
    _check_supported(header)
    config = build_config(header)
    return GgufSource(name or path.stem, path, config, _eos_token_ids(header, config["vocab_size"]), header)


def _check_supported(header: Header) -> None:
    path, meta = header.path, header.metadata
    architecture = meta.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise SourceError(f"{path}: GGUF architecture {shown(architecture)} is not supported; supported: "
                          f"{', '.join(FAMILIES)}. Use the model's safetensors folder instead.")
    if meta.get("split.count", 1) not in (0, 1):
        raise SourceError(f"{path} is one of {shown(meta['split.count'])} parts (split.count); merge them into one "
                          "file first (`llama-gguf-split --merge`)")
    family, keys = FAMILIES[architecture], Metadata(header)
    num_layers, num_stored = keys.num_layers, keys.need("block_count")
    if not any(name.startswith(f"blk.{num_layers - 1}.") for name in header.tensors):
        raise SourceError(f"{path}: {architecture}.block_count = {num_stored}, but layer {num_layers - 1} has no "
                          "tensors; the file is damaged: fetch it again")
    for entry in header.tensors.values():
        if entry.kind.name not in KINDS:
            raise SourceError(f"{path}: tensor {shown(entry.name)} is {entry.kind.name}, which is not supported; "
                              f"supported: {', '.join(KINDS)}. Use a file in one of these types")
        if len(entry.shape) < 2 and entry.kind.name not in FLOAT_KINDS:
            raise SourceError(f"{path}: tensor {shown(entry.name)} of shape {entry.shape} is {entry.kind.name}; a "
                              f"tensor of one dimension must be {', '.join(FLOAT_KINDS)}. Convert the model again")
        layer = re.match(r"blk\.(\d+)\.", entry.name)
        if layer is not None and int(layer[1]) >= num_stored:
            raise SourceError(f"{path}: tensor {shown(entry.name)} belongs to no layer: {architecture}.block_count = "
                              f"{num_stored}; the file is damaged: fetch it again")
        if family.places(entry.name, num_layers) is None:
            raise SourceError(f"{path}: tensor {shown(entry.name)} is not part of the architecture {architecture!r} as "
                              "Outrider knows it. Use the model's safetensors folder instead")


def build_config(header: Header) -> dict[str, Any]:
    meta, family = Metadata(header), FAMILIES[header.metadata["general.architecture"]]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{header.path}: tensor 'token_embd.weight' is missing; the file is damaged or incomplete: "
                          "fetch it again")
    meta.check_shown_sizes()
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": meta.need("embedding_length"),
        "intermediate_size": meta.get("feed_forward_length"),
        "num_hidden_layers": meta.num_layers,
        "max_position_embeddings": meta.need("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": _stored_dtype(header),
        **family.config(meta),
    }
    meta.refuse_unread()
    return config


def _stored_dtype(header: Header) -> str:
    """Return the dtype of most weights. Quantised weights count as bfloat16, because a GPU multiplies their codes in
    16-bit arithmetic and would have to dequantise them for float32."""
    sizes: dict[str, int] = {}
    for entry in header.tensors.values():
        dtype = {"F16": "float16", "F32": "float32"}.get(entry.kind.name, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def _eos_token_ids(header: Header, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text: end of text, of turn and of message, because a chat model may end with any of
    them."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {key: header.metadata[key] for key in keys if key in header.metadata}
    for key, token in found.items():
        check_value(f"{header.path}: {key}", Annotated[int, Range(0, vocab_size - 1)], token)
    return tuple(dict.fromkeys(found.values()))
