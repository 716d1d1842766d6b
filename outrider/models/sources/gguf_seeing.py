"""A GGUF file of a language model together with the file of its vision part, which lies beside it ("mmproj").

llama.cpp's converter writes the two parts of a model that sees into two files. Together they are a source with the
config and the names of the model's Hugging Face folder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.fields import shown
from outrider.models.sources.gguf import GgufSource
from outrider.models.sources.model_source import VISION_PART, SourceError
from outrider.models.vision.mmproj import ProjectorFile, read_projector

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

log = logging.getLogger("outrider")
HERE, THERE = "model.", "model.language_model."  # what names of the language model begin with, alone and in the whole
# A whole model's type -> its architecture, and its keys of tokens with the names of these tokens.
ARCHITECTURES = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified", "qwen3_vl": "Qwen3VL",
                 "qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
GEMMA_TOKENS = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
QWEN_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}


@dataclass(frozen=True)
class SeeingGgufSource(GgufSource):
    projector: ProjectorFile

    def tensor_names(self) -> set[str]:
        return {_in_whole(name) for name in super().tensor_names()}

    def stored_format(self, name: str) -> StoredFormat | None:
        return super().stored_format(HERE + name.removeprefix(THERE) if name.startswith(THERE) else name)

    def read(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        for name, tensor in super().read():
            yield _in_whole(name), tensor
            del tensor  # before the next one is read
        yield from self.projector.read()


def with_projector(source: GgufSource) -> GgufSource:
    """Return the source joined with the vision part that lies beside its file. If it is not served, or there are
    several, the source is returned as it is, and the log says why."""
    files = vision_parts(source.path)
    if len(files) > 1:
        log.warning("%s is served without images: beside it lie several vision parts (%s). Leave one there",
                    source.path, ", ".join(path.name for path in files))
        return source
    try:
        projector = read_projector(files[0])
        config = _whole_config(source, projector)
    except SourceError as error:
        log.warning("%s is served without images: %s", source.path, error)
        return source
    return SeeingGgufSource(source.name, source.path, config, source.eos_token_ids, source.header, projector)


def vision_parts(path: Path) -> list[Path]:
    """The files beside a GGUF file that hold the vision part of a model, by their names."""
    return sorted(own for own in path.parent.glob("*.gguf") if VISION_PART in own.name.lower())


def _in_whole(name: str) -> str:
    return THERE + name.removeprefix(HERE) if name.startswith(HERE) else name


def _whole_config(source: GgufSource, projector: ProjectorFile) -> dict[str, Any]:
    """The config of the whole model. The language model's file does not say how its tokens see images: all models of
    Gemma 4 without per-layer inputs let the tokens of an image see each other in both directions."""
    text = dict(source.config)
    config = projector.model_config(text)
    kind = config["model_type"]
    is_gemma = kind.startswith("gemma4")
    if is_gemma:
        text["use_bidirectional_attention"] = None if text.get("hidden_size_per_layer_input") else "vision"
    else:
        architecture = source.header.metadata["general.architecture"]
        text |= _rope_with(text, source.header.metadata.get(f"{architecture}.rope.dimension_sections"))
    tokens = _token_ids(source.header.metadata, GEMMA_TOKENS if is_gemma else QWEN_TOKENS)
    if "image_token_id" not in tokens:
        raise SourceError(f"{source.path}: its vocabulary has no token for images")
    return config | tokens | {"architectures": [f"{ARCHITECTURES[kind]}ForConditionalGeneration"], "text_config": text,
                              "tie_word_embeddings": text["tie_word_embeddings"], "dtype": text["dtype"]}


def _rope_with(text: Mapping[str, Any], sections: Any) -> dict[str, Any]:
    """The keys of the rope, with the numbers of frequencies for time, rows and columns."""
    if not isinstance(sections, list) or len(sections) < 3:
        raise SourceError(f"its metadata rope.dimension_sections is {shown(sections)} instead of three numbers")
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    own = {"rope_type": "default", "rope_theta": text["rope_theta"]} if "rope_theta" in text else {}
    return {key: own | dict(text.get(key) or {}) | {"mrope_section": sections[:3], "mrope_interleaved": True}}


def _token_ids(metadata: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    return {key: tokens.index(name) for key, name in names.items() if name in tokens}
