"""Reads the folder of an adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

This file does not depend on the model. Config keys that ask for unsupported arithmetic are refused by name. Sizes are
read from the file's header, so that shapes can be checked before any tensor is read."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.core.fields import shown
from outrider.lora_request import CONFIG, TENSORS

MAX_CONFIG_BYTES = 1 << 20
# Keys of patterns are regular expressions. Matching one takes time by a name's length to the power of its repeats, and
# exponential time where a group is repeated.
MAX_PATTERNS, MAX_PATTERN_LENGTH, MAX_REPEATS = 4096, 400, 3
REPEAT, REPEATED_GROUP = re.compile(r"(?<!\()[*+?{]"), re.compile(r"\)[*+{]")
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"
# Ends of tensor names: the factor (0: A, 1: B), and whether it is an embedding's. A name may hold the adapter's own.
FACTORS = (
    (re.compile(r"\.lora_([AB])(?:\.[^.]+)?\.weight$"), False),
    (re.compile(r"\.lora_embedding_([AB])(?:\.[^.]+)?$"), True),
)
# Keys that change what is computed, with the only values that are served, and the words of their refusal.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), "DoRA scales the weight's columns: merge the adapter into the weights"),
    "alora_invocation_tokens": ((), "activated LoRA begins in the middle of a prompt: use a plain LoRA"),
    "bias": (("none",), "biases that were trained are not served: train with bias='none'"),
    "lora_bias": ((False,), "biases that were trained are not served: train with lora_bias=False"),
    "modules_to_save": (([],), "whole modules that were trained are not served: merge them into the weights"),
    "fan_in_fan_out": ((False,), "transposed weights are not served"),
    "layer_replication": ((), "layers that are used twice are not served"),
    "trainable_token_indices": (([], {}), "embeddings that were trained are not served: merge them into the weights"),
    "use_qalora": ((False,), "QALoRA pools its inputs: merge the adapter into the weights"),
    "use_bdlora": ((), "block-diagonal LoRA is not served"),
    "megatron_config": ((), "adapters of Megatron layers are not served"),
    "arrow_config": ((), "routing among adapters is not served: name the adapter in the request"),
    "kasa_config": ((), "KaSA is not served: merge the adapter into the weights"),
    "monteclora_config": ((), "MonteCLoRA is not served: merge the adapter into the weights"),
}
# Initialisations that change the base model: the adapter belongs to those weights, not to the ones that are served.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", *REFUSED}
# What is adapted is read from the tensors (target_parameters say by which names patterns match them); the rest says how
# the adapter was trained.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type", "velora_config",
}


class AdapterError(ValueError):
    """Raised for a folder without an adapter that this engine can serve. The message names the key, tensor or file."""


@dataclass(frozen=True)
class FactorPair:
    """The names and shapes of one adapted module's two factors A and B in the file: y += scale * (x A') B'."""

    a: str  # names of the tensors
    b: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    is_embedding: bool


@dataclass(frozen=True)
class PeftFolder:
    """An adapter's folder. Opening it reads the config and the header of the file, but no tensor. `pairs`: the names of
    each module's factors, by the module's name in transformers."""

    path: Path
    pairs: Mapping[str, FactorPair]
    base_shapes: Mapping[str, tuple[int, ...]]  # of base weights that were saved beside the factors
    _ranks: Mapping[str, Any] = field(repr=False)
    _alphas: Mapping[str, Any] = field(repr=False)
    _parameters: tuple[str, ...] = ()  # ends of the names of parameters that are adapted by themselves
    _rank: int = 8
    _alpha: float = 8.0
    _is_rank_stabilized: bool = False

    @classmethod
    def open(cls, folder: str | Path) -> PeftFolder:
        path = Path(folder)
        config = _read_config(path)
        pairs, base_shapes = _read_pairs(path / TENSORS)
        return cls(path, pairs, base_shapes, _ranks=_pattern(path, config, "rank_pattern"),
                   _alphas=_pattern(path, config, "alpha_pattern"), _parameters=_parameters(path, config),
                   _rank=_positive(path, config, "r", 8),
                   _alpha=_number(path, "lora_alpha", config.get("lora_alpha", 8)),
                   _is_rank_stabilized=_switch(path, config, "use_rslora"))

    def scale(self, module: str) -> float:
        """The factor by which the product of a module's two matrices is multiplied: alpha / rank, or alpha /
        sqrt(rank)."""
        alpha, rank = _matched(self._alphas, self._key(module), self._alpha), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self._is_rank_stabilized else rank))

    def rank(self, module: str) -> int:
        """The rank of a module's factors according to the config."""
        return int(_matched(self._ranks, self._key(module), self._rank))

    def _key(self, module: str) -> str:
        """The name that PEFT matches with the config's patterns: the weight's name if a parameter is adapted, otherwise
        the module's name."""
        weight = f"{module}.weight"
        return weight if any(f".{weight}".endswith(f".{name}") for name in self._parameters) else module

    def read(self, wanted: Callable[[str, FactorPair, torch.Tensor, torch.Tensor], None]) -> None:
        """Read the two factors of every module, and call `wanted` with each module in turn."""
        file = self.path / TENSORS
        try:
            with safe_open(file, framework="pt") as handle:
                for module, pair in self.pairs.items():
                    wanted(module, pair, handle.get_tensor(pair.a), handle.get_tensor(pair.b))
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise AdapterError(f"{path} is no adapter, because it holds no {CONFIG}: name the folder of a LoRA saved by "
                           "PEFT")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{file} has more than {MAX_CONFIG_BYTES} bytes, so it is not the config of an adapter. "
                           "Name the folder of a LoRA saved by PEFT")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is damaged ({error}): fetch or save the adapter again") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} is damaged, because it does not hold a JSON object: fetch or save the adapter "
                           "again")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type {shown(config.get('peft_type'))} is not supported: only LORA is")
    for key, value in config.items():
        if key in REFUSED and value is not None and value not in REFUSED[key][0]:
            raise AdapterError(f"{file}: {key}={shown(value)} is not supported: {REFUSED[key][1]}")
        if key not in READ | HARMLESS and value not in (None, False, [], {}):
            raise AdapterError(f"{file}: {key}={shown(value)} is not supported: Outrider does not know this key, which "
                               "could change what the adapter computes. Remove it if it has no effect")
    drawn = config.get("init_lora_weights")
    if isinstance(drawn, str) and drawn.lower().startswith(CHANGES_BASE):
        raise AdapterError(f"{file}: init_lora_weights={shown(drawn)} has changed the base model: save the adapter "
                           "with path_initial_model_for_weight_conversion, which makes a plain LoRA of it")
    return config


def _read_pairs(file: Path) -> tuple[dict[str, FactorPair], dict[str, tuple[int, ...]]]:
    """Return the names of each module's factors. Also return the shapes of base weights, which PEFT saves beside the
    factors of adapted embeddings and heads."""
    if not file.is_file():
        raise AdapterError(f"{file.parent} holds no {TENSORS}: save the adapter as safetensors")
    try:
        with safe_open(file, framework="pt") as handle:
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    found: dict[str, tuple[bool, dict[str, str]]] = {}  # by module: whether it is an embedding, and its A and B
    base_shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(shapes):
        for pattern, is_embedding in FACTORS:
            if (end := pattern.search(name)) is not None:
                module = name[: end.start()].removeprefix(PREFIX)
                own = found.setdefault(module, (is_embedding, {}))
                other = next(iter(own[1].values())) if own[0] != is_embedding else own[1].get(end[1])
                if other is not None:
                    raise AdapterError(f"{file}: {other} and {name} are both for {module}: save only one adapter in a "
                                       "file")
                own[1][end[1]] = name
                break
        else:
            if name.endswith(BASE_WEIGHT):
                base_shapes[name.removeprefix(PREFIX).removesuffix(BASE_WEIGHT)] = shapes[name]
                continue
            raise AdapterError(f"{file}: tensor {name} is no part of a LoRA: save the adapter with PEFT")
    pairs: dict[str, FactorPair] = {}
    for module, (is_embedding, names) in found.items():
        if len(names) < 2:
            raise AdapterError(f"{file}: {next(iter(names.values()))} has no counterpart: each lora_A needs a lora_B. "
                               "Fetch or save the adapter again")
        pairs[module] = FactorPair(names["A"], names["B"], shapes[names["A"]], shapes[names["B"]], is_embedding)
    if not pairs:
        raise AdapterError(f"{file} holds no tensors: fetch or save the adapter again")
    return pairs, base_shapes


def _parameters(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("target_parameters") or ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) for name in given):
        raise AdapterError(f"{path / CONFIG}: target_parameters must be a list of names, got {shown(given)}")
    return tuple(name for name in given if name.endswith(".weight"))


def _pattern(path: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{path / CONFIG}: {key} must be an object, got {shown(given)}")
    if len(given) > MAX_PATTERNS:
        raise AdapterError(f"{path / CONFIG}: {key} has {len(given)} names, and at most {MAX_PATTERNS} are supported: "
                           "give fewer")
    for name, value in given.items():
        _number(path, f"{key}: {name}", value)
        is_costly = len(name) > MAX_PATTERN_LENGTH or len(REPEAT.findall(name)) > MAX_REPEATS
        if is_costly or REPEATED_GROUP.search(name) is not None:
            raise AdapterError(f"{path / CONFIG}: {key}: {shown(name)} repeats too much, and could take very long to "
                               f"match: repeat no group, and nothing else more than {MAX_REPEATS} times")
        try:
            re.compile(name)
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(f"{path / CONFIG}: {key}: {shown(name)} is not a valid regular expression ({error}): "
                               "correct it") from error
    return given


def _matched(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Look up a module's value in a dict of patterns, as PEFT does: the first pattern that matches the end of the
    module's name wins. `default` if none matches."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _positive(path: Path, config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{path / CONFIG}: {key} must be a positive integer, got {shown(value)}")
    return value


def _switch(path: Path, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{path / CONFIG}: {key} must be true or false, got {shown(value)}")
    return bool(value)


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise AdapterError(f"{path / CONFIG}: {key} must be a number greater than 0, got {shown(value)}")
    return float(value)


def _damaged(file: Path, error: Exception) -> AdapterError:
    return AdapterError(f"{file} is truncated or damaged ({error}): fetch it again")
