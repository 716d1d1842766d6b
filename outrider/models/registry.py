"""From a model folder to a model: which class serves an architecture, and the files beside the weights.

Knows folders only: finding or downloading one is up to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch

from outrider.core.fields import INT32, Range, check_value, shown
from outrider.models.bamba import Bamba
from outrider.models.base import Model
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.gemma3 import Gemma3
from outrider.models.gemma4 import Gemma4
from outrider.models.llama import Llama, Mistral, Qwen2, Qwen3
from outrider.models.loader import load_dummy, load_weights, safetensors_tensors
from outrider.models.nemotron_h import NemotronH
from outrider.models.qwen3_5 import Qwen3_5
from outrider.models.qwen3_moe import Qwen3Moe
from outrider.models.qwen3_next import Qwen3Next

LOAD_FORMATS = ("auto", "dummy")

_ARCHITECTURES: dict[str, type[Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen3_5,
    "Qwen3_5ForConditionalGeneration": Qwen3_5,
    "Qwen3_5MoeForCausalLM": Qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5,
    "NemotronHForCausalLM": NemotronH,
    "BambaForCausalLM": Bamba,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma4ForCausalLM": Gemma4,
    "Gemma4ForConditionalGeneration": Gemma4,
    "Gemma4UnifiedForCausalLM": Gemma4,
    "Gemma4UnifiedForConditionalGeneration": Gemma4,
}


def register(architecture: str, model_class: type[Model]) -> None:
    """Serve `architecture` (a name in a config's `architectures`) with `model_class` from now on."""
    _ARCHITECTURES[architecture] = model_class


def build_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    source: str = "config.json",
) -> Model:
    """A model without its weights. max_len: positions it must serve, the config's own by default."""
    reader = ConfigReader(config, source)
    architectures = reader.required("architectures", list)
    if not architectures or str(architectures[0]) not in _ARCHITECTURES:
        raise reader.refusal("architectures", f"known are {', '.join(sorted(_ARCHITECTURES))}")
    model_class: Any = _ARCHITECTURES[architectures[0]]
    positions = reader.text_section().optional("max_position_embeddings", int)
    if max_len is not None and positions is not None and max_len > positions:  # before tables of that length are made
        raise ValueError(f"max_model_len ({max_len}) exceeds the {positions} positions the model was made for")
    return model_class(reader, dtype=dtype, device=torch.device(device), max_len=max_len)


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> Model:
    """The model in `folder`, ready to run. load_format "dummy" needs config.json alone and draws weights by `seed`."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r} is not supported; supported: {', '.join(LOAD_FORMATS)}")
    folder = Path(folder)
    source = str(folder / "config.json")
    model = build_model(read_config(folder), dtype=dtype, device=device, max_len=max_len, source=source)
    if load_format == "dummy":
        load_dummy(model, seed)
    else:
        load_weights(model, safetensors_tensors(folder))
    return model


def read_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a model folder holds a config.json and its weights")
    config = _read_json(path)
    generation = path.with_name("generation_config.json")
    # What a model must never say is part of what it computes, and newer checkpoints keep it in the other file.
    suppressed = _read_json(generation).get("suppress_tokens") if generation.is_file() else None
    return config if suppressed is None else config | {"suppress_tokens": suppressed}


def eos_token_ids(source: str | Path | Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: of a folder (generation_config.json first, then config.json) or of a config."""
    if isinstance(source, Mapping):
        return _eos_of(source)
    generation, config = Path(source) / "generation_config.json", read_config(source)
    vocab_size = ConfigReader(config).text_section().get("vocab_size", int, INT32)
    found = _eos_of(_read_json(generation), generation.name, vocab_size) if generation.is_file() else ()
    return found or _eos_of(config, "config.json", vocab_size)


def _eos_of(config: Mapping[str, Any], name: str = "config.json", vocab_size: int = INT32) -> tuple[int, ...]:
    """Ids outside the vocabulary are refused here, where it is known who gave them."""
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), Mapping):
        value = config["text_config"].get("eos_token_id")
    token_id = Annotated[int, Range(0, vocab_size - 1)]
    try:
        check_value("eos_token_id", token_id | list[token_id] | None, value)  # type: ignore[valid-type]
    except ValueError as error:
        raise ConfigError(f"{name}: {error}: the vocabulary has {vocab_size} tokens") from None
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shown(value)}; download it again")
    return value
