"""BlockConfig: a block drafter's config, read from the publishers' formats (DFlash, DSpark) or the speculators
library's.

The formats have different names for the same settings. A layer id i means the residual stream after layer i, counted
from 0 in the publishers' files and from 1 in speculators' files. `BlockConfig` has the number of layers before the
stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.models.config import FULL, SLIDING, ConfigError, ConfigReader, Sizes, refuse_unsupported

KINDS = {"dflash": "DFlash", "dspark": "DSpark"}
MARKOV_TYPES = ("vanilla", "gated", "rnn")
OTHER_FORMS = {
    "DFlash2DraftModel": "DFlash2 has convolutions and a codebook of candidates",
    "Gemma4DSparkModel": "its layers are those of Gemma 4",
}  # known classes whose arithmetic is not built here


@dataclass(frozen=True)
class Sight:
    """The keys to which a row of a block may attend in one layer."""

    is_causal: bool  # rows of the block up to its own; otherwise all rows of the block
    window: int | None  # a row at p sees nothing before p - window + 1


@dataclass(frozen=True)
class MarkovSizes:
    rank: int
    kind: str  # of MARKOV_TYPES


@dataclass(frozen=True)
class BlockConfig:
    top: ConfigReader
    layer: ConfigReader  # describes the transformer layers
    sizes: Sizes
    aux_layers: tuple[int, ...]
    mask_token: int  # stands in the block where drafts are predicted
    block_size: int  # token rows of a block in training, the last known token's among them
    samples_from_anchor: bool  # whether the row of the last known token predicts the first draft
    sights: tuple[Sight, ...]  # by layer
    markov: MarkovSizes | None
    has_confidence: bool
    confidence_reads_markov: bool

    @property
    def made_for(self) -> int:
        """Return the number of drafts per step for which the drafter was trained."""
        return self.block_size - (not self.samples_from_anchor)


def is_block_config(config: ConfigReader) -> bool:
    """Whether the config describes a block drafter, in any format, supported or not."""
    return config.raw("speculators_model_type") in KINDS or any(
        word in str(name) for name in config.get("architectures", list, []) for word in KINDS.values())


def read_block_config(config: ConfigReader, num_target_layers: int) -> BlockConfig:
    is_speculators = config.has("speculators_model_type")
    layer = config.section("transformer_layer_config") if is_speculators else config
    refuse_unsupported(layer)
    kind = _kind(config)
    form = _Speculators(config, layer, kind) if is_speculators else _Published(config, layer, kind)
    sizes = Sizes.read(layer, head_dim=128)
    layer.passes_over("use_sliding_window", "max_window_layers", "sliding_window", "layer_types")
    config.passes_over("num_anchors", "speculators_config", "base_model_ep_plan")
    config.must_equal("is_neox_style", True, default=True)
    config.must_equal("logit_scale", 1, default=1)
    known = config.get("num_target_layers", int, num_target_layers)
    if known != num_target_layers:
        raise config.refusal("num_target_layers", f"the target has {num_target_layers} layers",
                             "Use a drafter that was made for this target.")
    rank = form.option("markov_rank").get("markov_rank", int, form.default_rank)
    markov = None
    if rank:
        markov = MarkovSizes(rank, form.option("markov_head_type").must_equal(
            "markov_head_type", *MARKOV_TYPES, default="vanilla"))
    form.option("markov_head_type").passes_over("markov_head_type")
    has_confidence = form.flag("enable_confidence_head", form.default_confidence)
    reads_markov = form.flag("confidence_head_with_markov", has_confidence and markov is not None)
    if has_confidence and reads_markov and markov is None:
        raise form.option("markov_rank").refusal("markov_rank", "it must be above 0, because "
                                                                "confidence_head_with_markov is true")
    samples_from_anchor = form.flag("sample_from_anchor", kind == "dspark")
    block_size = form.option("block_size").required("block_size", int, least=1 if samples_from_anchor else 2)
    mask_token = form.option("mask_token_id").required("mask_token_id", int, least=0)
    if mask_token >= sizes.vocab_size:
        raise form.option("mask_token_id").refusal("mask_token_id", "it must be a token id from 0 to "
                                                                    f"{sizes.vocab_size - 1}")
    return BlockConfig(config, layer, sizes, form.aux_layers(num_target_layers), mask_token, block_size,
                       samples_from_anchor, form.sights(), markov, has_confidence, reads_markov)


def _kind(config: ConfigReader) -> str:
    if config.has("speculators_model_type"):
        return str(config.must_equal("speculators_model_type", *KINDS))
    names = [str(name) for name in config.get("architectures", list, [])]
    refused = next((name for name in names if name in OTHER_FORMS), None)
    if refused is not None:
        raise config.refusal("architectures", OTHER_FORMS[refused], "Use a DFlash or DSpark drafter with Qwen3 layers.")
    found = next((kind for kind, word in KINDS.items() if any(word in name for name in names)), None)
    if found is None:
        raise config.refusal("architectures", "this is not a block drafter",
                             "Use one with the architecture DFlashDraftModel or Qwen3DSparkModel, or another method.")
    return found


class _Published:
    """Reads a config in the publishers' form: one dict describes the layers and the drafter, and some keys may be
    nested, for example below `dflash_config`."""

    default_rank = 0
    default_confidence = False

    def __init__(self, config: ConfigReader, layer: ConfigReader, kind: str) -> None:
        self.config, self.layer = config, layer
        self._nested = [config.section_or_empty(f"{word}_config") for word in KINDS]

    def option(self, key: str) -> ConfigReader:
        """Return the reader of the dict that has the key."""
        return next((nested for nested in self._nested if nested.has(key)), self.config)

    def flag(self, key: str, default: bool) -> bool:
        return self.option(key).get(key, bool, default)

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        key = next((key for key in ("target_layer_ids", "dspark_target_layer_ids") if self.option(key).has(key)), None)
        if key is None:
            ids = spread_layers(num_target_layers, self.layer.required("num_hidden_layers", int))
            return tuple(layer + 1 for layer in ids)
        reader = self.option(key)
        return _checked_aux_layers(reader, key, reader.required(key, list), num_target_layers, offset=1)

    def sights(self) -> tuple[Sight, ...]:
        """Return, for each layer, the keys that its rows may attend to. Layers that `layer_types` calls sliding are
        causal within the block, and other layers are not. `causal` or `is_causal` overrides this for all layers."""
        count = self.layer.required("num_hidden_layers", int)
        kinds = _layer_types(self.layer, count)
        slides_all = self.flag("use_swa", False) and SLIDING not in kinds
        windows = [self._window() if slides_all or kind == SLIDING else None for kind in kinds]
        told = next((self.flag(key, False) for key in ("is_causal", "causal") if self.option(key).has(key)), None)
        return tuple(Sight(kind == SLIDING if told is None else told, window)
                     for kind, window in zip(kinds, windows, strict=True))

    def _window(self) -> int:
        reader = self.option("swa_window_size")
        if reader.has("swa_window_size"):
            return reader.required("swa_window_size", int)
        return self.layer.required("sliding_window", int)


class _Speculators(_Published):
    """Reads a config in the form of the speculators library, in which `transformer_layer_config` describes the
    layers."""

    def __init__(self, config: ConfigReader, layer: ConfigReader, kind: str) -> None:
        super().__init__(config, layer, kind)
        if kind == "dspark":
            self.default_rank, self.default_confidence = 256, True

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        key = "aux_hidden_state_layer_ids"
        return _checked_aux_layers(self.config, key, self.config.required(key, list), num_target_layers, offset=0)

    def sights(self) -> tuple[Sight, ...]:
        count = self.layer.required("num_hidden_layers", int)
        is_causal = not self.flag("sliding_window_non_causal", False)
        return tuple(Sight(is_causal, self._window()) if kind == SLIDING else Sight(False, None)
                     for kind in _layer_types(self.layer, count))


def _layer_types(layer: ConfigReader, count: int) -> list[Any]:
    kinds = layer.get("layer_types", list, [FULL] * count)
    if len(kinds) != count or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise layer.refusal("layer_types", f"it must list the kind of each of the {count} layers (num_hidden_layers): "
                                           f"{FULL} or {SLIDING}")
    return kinds


def _checked_aux_layers(reader: ConfigReader, key: str, ids: list[Any], num_target_layers: int, offset: int
                        ) -> tuple[int, ...]:
    least, most = -offset, num_target_layers - offset
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and least <= i <= most for i in ids):
        raise ConfigError(f"{reader.source}: {key}={ids!r} is not supported: the target has {num_target_layers} "
                          f"layers, so ids are {least} (the embedding) to {most}; use a drafter that was made for this "
                          "target")
    return tuple(i + offset for i in ids)


def spread_layers(num_target_layers: int, count: int) -> list[int]:
    """The target layers that a DFlash drafter of `count` layers reads if its config names none: evenly spread from
    layer 1 to the third from the end, or the middle one for a single layer."""
    if count == 1:
        return [num_target_layers // 2]
    last = max(1, num_target_layers - 3)
    return [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
