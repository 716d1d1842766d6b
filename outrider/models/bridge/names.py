"""CheckpointNames: maps tensor names in files to the slots (named weight tensors) of a bridged model.

transformers renames tensors of older files and joins the matrices of experts while it loads; its own tables say how.
Experts keep separate matrices here, so only the names of these joins are used."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

EXPERT = re.compile(r"\.experts\.(\d+)\.")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class CheckpointNames:
    def __init__(self, model: Any) -> None:
        """model: transformers' model, before any of its modules are replaced."""
        loading = import_module("transformers.core_model_loading")
        conversions = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        self._rename = loading.rename_source_key
        self._renamings = [each for each in conversions if not isinstance(each, loading.WeightConverter)]
        self._converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
        self._prefix, self._state = model.base_model_prefix, dict.fromkeys(model.state_dict())
        unexpected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in unexpected]

    def slot_name(self, name: str) -> str:
        renamed, pattern = self._rename(name, self._renamings, self._converters, self._prefix, self._state)
        if pattern is None:
            return str(renamed)
        expert = EXPERT.search(name)
        experts, _, projection = renamed.rpartition(".")
        order = next(each.source_patterns for each in self._converters if pattern in each.source_patterns)
        parts = PARTS.get(projection, ())
        if expert is None or len(order) != len(parts):
            return name  # the loader tells of it, as a tensor that has no place
        return f"{experts}.{expert[1]}.{parts[order.index(pattern)]}.weight"

    def ignores(self, name: str) -> bool:
        """Whether transformers skips a tensor of this name."""
        return any(pattern.search(name) for pattern in self._ignored)
