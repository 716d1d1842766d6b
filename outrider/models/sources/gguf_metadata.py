"""Metadata: typed reads of the keys that describe a GGUF file's architecture. Keys that no code reads are refused."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from outrider.core.fields import FLOAT32, INT32, Count, Range, check_value, shown
from outrider.models.config_reader import LARGEST
from outrider.models.sources.gguf_header import Header, named
from outrider.models.sources.model_source import SourceError

HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")  # keys that change nothing, or are said twice
OTHER_FILES = "Use the model's safetensors folder instead."
Whole: TypeAlias = Annotated[int, Range(0, INT32)]
# What a key's value may be; of keys that are not listed, a whole number.
VALUES: dict[str, Any] = {
    "block_count": Annotated[int, Range(1, LARGEST["num_hidden_layers"])],
    **dict.fromkeys(("context_length", "embedding_length", "attention.key_length", "attention.key_length_mla",
                     "attention.key_length_swa", "attention.kv_lora_rank", "attention.sliding_window",
                     "full_attention_interval", "rope.scaling.original_context_length", "ssm.conv_kernel",
                     "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"), Count),
    "attention.head_count": Count | list[Whole],
    **dict.fromkeys(("feed_forward_length", "attention.head_count_kv", "expert_feed_forward_length",
                     "rope.dimension_sections"), Whole | list[Whole]),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
                    Annotated[float, Range(0, 1)]),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), Annotated[float, Range(1, FLOAT32)]),
    **dict.fromkeys(("final_logit_softcapping", "expert_weights_scale", "rope.scale_linear", "rope.scaling.factor",
                     "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
                     "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
                     "rope.scaling.yarn_log_multiplier"), float),
    "rope.scaling.type": str,
    "expert_weights_norm": bool | int,
    **dict.fromkeys(("attention.sliding_window_pattern", "attention.recurrent_layers", "attention.indexer.types"),
                    bool | int | list[bool] | list[int]),
}
# Sizes that tensors show too: their keys, and a tensor of each layer, or of the model, with the axis of the size.
SHOWN_SIZES = (("embedding_length", "token_embd.weight", 1), ("feed_forward_length", "ffn_down.weight", 1),
               ("expert_count", "ffn_down_exps.weight", 0), ("expert_feed_forward_length", "ffn_down_exps.weight", 2))


class Metadata:
    """Reads the keys of a file's architecture, and checks them against the shapes of its tensors."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.prefix = f"{header.metadata.get('general.architecture')}."
        self._read = {self.prefix + key for key in HARMLESS}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key below the architecture's name. A value of another type or size is refused."""
        name = self.prefix + key
        self._read.add(name)
        if name not in self.header.metadata:
            return default
        value = self.header.metadata[name]
        try:
            check_value(f"{self.header.path}: {name}", VALUES.get(key, Whole), value)
        except ValueError as error:
            raise SourceError(f"{error}; the file is damaged: fetch it again") from None
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise SourceError(f"{self.header.path}: metadata {self.prefix}{key} is missing; the file is damaged or "
                              "incomplete: fetch it again")
        return value

    def need_number(self, key: str) -> Any:
        """Return a required value that is the same in all layers."""
        value = self.need(key)
        if isinstance(value, list):
            raise SourceError(f"{self.header.path}: {self.prefix}{key} has a value for each layer, and Outrider "
                              f"supports only one value for all layers. {OTHER_FILES}")
        return value

    def by_layer(self, key: str) -> list[Any]:
        """Return the value of each layer. A single value in the file counts for all layers."""
        value, count = self.need(key), self.need("block_count")
        if not isinstance(value, list):
            return [value] * count
        if len(value) < count:
            raise SourceError(f"{self.header.path}: {self.prefix}{key} has {len(value)} values for {count} layers; the "
                              "file is damaged: fetch it again")
        return value[:count]

    def check_shown_sizes(self) -> None:
        """Refuse sizes that contradict the tensors' shapes. The error names the key."""
        for key, tensor, axis in SHOWN_SIZES:
            for layer in range(self.num_layers):
                entry = self.header.tensors.get(tensor) or self.header.tensors.get(f"blk.{layer}.{tensor}")
                if self.get(key) is None or entry is None or axis >= len(entry.shape):
                    continue
                size = self.by_layer(key)[layer]
                if entry.shape[axis] != size:
                    raise SourceError(f"{self.header.path}: {self.prefix}{key} = {size}, but tensor "
                                      f"{shown(entry.name)} has the shape {entry.shape}; the file is damaged: fetch it "
                                      "again")

    def check_rows(self, key: str, tensor: str, rows: int) -> None:
        """Refuse a number of heads that contradicts the rows of a matrix, in the first layer that has the matrix."""
        for layer in self.layers_with(tensor)[:1]:
            entry = self.header.tensors[f"blk.{layer}.{tensor}"]
            if entry.shape[0] != rows:
                raise SourceError(f"{self.header.path}: {self.prefix}{key} = {self.get(key)} needs {rows} rows, but "
                                  f"tensor {shown(entry.name)} has the shape {entry.shape}; the file is damaged: fetch "
                                  "it again")

    def must_equal(self, key: str, value: Any, why: str) -> None:
        found = self.get(key, value)
        if found != value:
            raise SourceError(f"{self.header.path}: {self.prefix}{key} = {shown(found)} is not supported{why}; "
                              f"supported: {shown(value)}. {OTHER_FILES}")

    def refusal(self, key: str, why: str, advice: str = OTHER_FILES) -> SourceError:
        found = f"{self.header.path}: {self.prefix}{key} = {shown(self.get(key))}"
        return SourceError(f"{found} is not supported: {why}. {advice}")

    def refuse_unread(self) -> None:
        for key, value in self.header.metadata.items():
            if key.startswith(self.prefix) and key not in self._read:
                raise SourceError(f"{self.header.path}: Outrider does not read {named(key)} = {shown(value)}, which "
                                  f"may change the results. {OTHER_FILES}")

    @property
    def num_layers(self) -> int:
        """Return the number of the model's own layers. Layers after them predict further tokens and are not read."""
        count: int = self.need("block_count") - self.get("nextn_predict_layers", 0)
        if count < 1:
            raise self.refusal("nextn_predict_layers", "it must be below the number of all layers, block_count = "
                                                       f"{self.need('block_count')}", "Fetch the file again.")
        return count

    def layers_with(self, tensor: str) -> list[int]:
        """Return the layers that have a tensor of this name, which follows "blk.0." in the full name."""
        return [layer for layer in range(self.num_layers) if f"blk.{layer}.{tensor}" in self.header.tensors]
