"""A folder in Hugging Face's form as a model source: config.json, safetensors and tokenizer files.

Torch is imported only when weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.core.fields import INT32, Range, check_value, shown
from outrider.models.config_reader import ConfigError, ConfigReader
from outrider.models.sources.cache_scales import ScalePairs, find_scales, pair_scales
from outrider.models.sources.model_source import ModelSource
from outrider.models.sources.quantization import KEY, Quantization, find_quantization, quantization_section

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight


class FolderSource(ModelSource):
    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    def tensor_names(self) -> set[str]:
        from outrider.models.sources.safetensors_files import safetensors_names

        return safetensors_names(self.path)

    def stored_format(self, name: str) -> StoredFormat | None:
        quantization, names = self._quantization, self._held_names
        is_stored = bool(quantization_section(self.config)) if names is None else quantization.proof(name) in names
        return quantization.stored_format(name) if is_stored else None

    @cached_property
    def _quantization(self) -> Quantization:
        return find_quantization(self.config)

    @cached_property
    def _held_names(self) -> set[str] | None:
        """Return the names of all tensors. None if the folder has no weights, as for a dummy model. Cached, because the
        lookup of every matrix needs them."""
        try:
            return self.tensor_names()
        except FileNotFoundError:
            return None

    def read(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        from outrider.models.sources.safetensors_files import safetensors_tensors

        return safetensors_tensors(self.path, self._quantization)

    def cache_scales(self) -> ScalePairs:
        from outrider.models.sources.safetensors_files import read_tensors

        names = find_scales(self.tensor_names(), quantization_section(self.config))
        return pair_scales(read_tensors(self.path, names))

    def tokenizer(self) -> Path:
        return self.path


def folder_source(path: Path, name: str | None = None) -> ModelSource:
    config = _with_own_output(path, read_config(path))
    return FolderSource(name or path.resolve().name, path, config, eos_token_ids(path))


def _with_own_output(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Resolve a config whose text section is untied while the whole model is tied, which some of transformers' config
    classes have by default. The head counts as tied only if the files contain no output matrix."""
    text, key = config.get("text_config"), "tie_word_embeddings"
    if config.get(key) is not True or not isinstance(text, dict) or text.get(key) is not False:
        return config
    from outrider.models.sources.safetensors_files import safetensors_names

    try:
        names = safetensors_names(path)
    except FileNotFoundError:  # a folder without weights
        return config
    return config | {key: not any("lm_head" in name.split(".") for name in names)}


def read_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a model folder holds a config.json and its weights")
    config = _read_json(path)
    if not config.get(KEY):
        config = config | _quantization_beside(path)
    generation = path.with_name("generation_config.json")
    # Suppressed tokens are part of the model's arithmetic, and newer checkpoints list them in the other file.
    suppressed = _read_json(generation).get("suppress_tokens") if generation.is_file() else None
    return config if suppressed is None else config | {"suppress_tokens": suppressed}


def _quantization_beside(path: Path) -> dict[str, Any]:
    """Return the `quantization_config` that GPTQ and ModelOpt tools may write into a separate file; {} if there is
    none."""
    gptq, modelopt = path.with_name("quantize_config.json"), path.with_name("hf_quant_config.json")
    if gptq.is_file():
        return {KEY: {"quant_method": "gptq"} | _read_json(gptq)}
    found = _read_json(modelopt).get("quantization") if modelopt.is_file() else None
    return {KEY: {"quant_method": "modelopt"} | found} if isinstance(found, dict) else {}


def eos_token_ids(source: str | Path | Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text, from a folder (generation_config.json first, then config.json) or from a
    config."""
    if isinstance(source, Mapping):
        return _eos_of(source)
    generation, own, config = Path(source) / "generation_config.json", Path(source) / "config.json", read_config(source)
    vocab_size = ConfigReader(config, str(own)).text_section().get("vocab_size", int, INT32)
    found = _eos_of(_read_json(generation), str(generation), vocab_size) if generation.is_file() else ()
    return found or _eos_of(config, str(own), vocab_size)


def _eos_of(config: Mapping[str, Any], name: str = "config.json", vocab_size: int = INT32) -> tuple[int, ...]:
    """Return the eos ids of a config. Ids outside the vocabulary are refused here, because here the message can name
    the file."""
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), Mapping):
        value = config["text_config"].get("eos_token_id")
    token_id = Annotated[int, Range(0, vocab_size - 1)]
    try:
        check_value("eos_token_id", token_id | list[token_id] | None, value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}: the vocabulary has {vocab_size} tokens. Correct it in "
                          "that file, or delete the key: answers then end at max_tokens or a stop text") from None
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shown(value)}; download it again")
    return value
