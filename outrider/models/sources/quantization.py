"""Quantization: reads weights that are stored by the method in a folder's `quantization_config`.
`register_quantization` adds a method.

A method says which tensors of the files belong together, and in which format each matrix is stored. `outrider.formats`
decides which formats stay quantised in memory; matrices in all others are dequantised while they are loaded."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.cache_scales import SUFFIXES

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

KEY = "quantization_config"


class Quantization(ABC):
    """Reads the weights that one `quantization_config` describes. A matrix named `x` is stored in the tensor `x` +
    `suffix` and in one more tensor, `x` + name, for each name in `beside`."""

    suffix: str = ".weight"
    beside: tuple[str, ...]  # the first is there for every stored matrix, others may be
    plain_suffix: str = ".weight"  # of a matrix of plain numbers

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: the config's section. Raises ValueError, with the key, for unsupported settings."""

    @abstractmethod
    def stored_format(self, name: str) -> StoredFormat | None:
        """Return how the matrix of this name is stored. None if it is not quantised."""

    @abstractmethod
    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        """Build the `StoredWeight` of a matrix from its tensors, which are given by suffix."""

    def proof(self, name: str) -> str:
        """Return the name of a tensor that is in the files only if the matrix of this name is quantised."""
        return name + self.beside[0]

    def is_beside(self, name: str, names: Collection[str]) -> bool:
        """Whether the tensor is not read by itself, because it is read together with a matrix, as scales are, or
        belongs to the KV cache (`cache_scales.py`)."""
        return name.endswith(SUFFIXES) or any(name.endswith(end) and name.removesuffix(end) + self.suffix in names
                                              for end in self.beside)


class ModuleNames:
    """A config's list of modules, which selects matrices."""

    def __init__(self, reader: ConfigReader, *keys: str) -> None:
        """keys: the names that different tools give the list."""
        self.patterns = [name for key in keys for name in reader.get(key, list[Any], [])]
        for key in keys:
            for name in reader.get(key, list[Any], []):
                try:
                    re.compile(name.removeprefix("re:"))
                except (re.error, AttributeError) as error:
                    raise reader.refusal(key, f"{name!r} is neither a module's name nor a regular expression "
                                              f"({error})") from None

    def __contains__(self, name: object) -> bool:
        return any(is_module(pattern, str(name)) for pattern in self.patterns)


def is_module(pattern: str, name: str) -> bool:
    """Whether a pattern of a config matches the name of this module or of a module that contains it. "re:" starts a
    regular expression that matches from the name's start, "*" matches anything, and other patterns match whole
    components of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."


_FILES = "outrider.models.sources."
# By quant_method; those of the package as "module:class", imported when they are needed.
_METHODS: dict[str, type[Quantization] | str] = {
    "fp8": _FILES + "fp8:Fp8Files",
    "compressed-tensors": _FILES + "compressed_tensors:CompressedTensors",
    "gptq": _FILES + "integer_groups:GptqFiles",
    "awq": _FILES + "integer_groups:AwqFiles",
    "modelopt": _FILES + "modelopt:ModelOptFiles",
    "mxfp4": _FILES + "mxfp4:Mxfp4Experts",
    "fbgemm_fp8": _FILES + "fp8:Fp8Files",
}


def methods() -> list[str]:
    """Return the values of `quant_method` that can be read."""
    return list(_METHODS)


def register_quantization(quant_method: str, quantization: type[Quantization]) -> None:
    """Read checkpoints with this `quant_method` in their `quantization_config` by this class from now on."""
    _METHODS[quant_method] = quantization


def read_quantization(settings: Mapping[str, Any]) -> Quantization:
    """Return the reader for a `quantization_config`. Raises ValueError with the reason if its method is not
    supported."""
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"{KEY}: quant_method={method!r} is not one of {', '.join(_METHODS)}; use files in one of "
                         "these forms, a GGUF file, or the unquantised model with quantization='fp8' or 'int4'")
    found = _METHODS[method]
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(import_module(module), name)
    made: Quantization = found(settings)
    return made


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of a model's config that says how weights are quantised. Empty if they are not."""
    return config.get(KEY) or (config.get("text_config") or {}).get(KEY) or {}


def find_quantization(config: Mapping[str, Any]) -> Quantization:
    """Return the reader for the quantised weights of a model's config. If the config has no section, the files may
    still contain fp8 matrices with block scales, so that method is the default."""
    return read_quantization(quantization_section(config) or {"quant_method": "fp8", "weight_block_size": [128, 128]})
