"""Read the configs of Gemma 4 models and assistants, with the keys of old and new checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.mixers import AttentionLayer
from outrider.mixers.paged.masks import RangeReach
from outrider.models.config import FULL, LEAST_SOFTCAP, SLIDING, ConfigReader, Sizes, layer_windows, refuse_unsupported

ACTIVATION = "gelu_pytorch_tanh"
SCALE = 1.0  # scale of attention scores; q and k are normed


@dataclass(frozen=True)
class LayerShape:
    """The properties in which layers differ from each other."""

    attention: AttentionLayer
    kind: str
    reads: int | None  # the layer whose cache it reads; None if it has its own
    has_v: bool  # False if its values are its keys before their norm
    intermediate_size: int


def is_unified(text: ConfigReader) -> bool:
    return text.get("model_type", str, "").startswith("gemma4_unified")


def read_sizes(text: ConfigReader) -> Sizes:
    refuse_unsupported(text, ACTIVATION, "hidden_activation")
    text.must_equal("use_bidirectional_attention", None, False, "vision")  # text is causal with "vision" too
    return Sizes.read(text, head_dim=256, is_tied=True)


def read_kinds(text: ConfigReader, num_layers: int) -> list[str]:
    """Read the attention kind of each layer from `layer_types`. Without this key, every n-th layer has full attention
    (n: `sliding_window_pattern`), the others a sliding window. The last layer always has full attention."""
    pattern = text.get("sliding_window_pattern", int, 6, least=1)
    kinds = list(text.get("layer_types", list, [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]))
    return [*kinds[:-1], FULL]


def read_shapes(text: ConfigReader, sizes: Sizes, first_layer: int = 0) -> list[LayerShape]:
    """Read the shape of each layer. `reads` is the index of a layer of the same model. In an assistant all layers read
    the target's caches, and `reads` is set later."""
    kinds = read_kinds(text, sizes.num_layers)
    windows = layer_windows(text, kinds)
    softcap = text.optional("attn_logit_softcapping", float, least=LEAST_SOFTCAP)
    num_own = sizes.num_layers - text.get("num_kv_shared_layers", int, 0)
    if not 0 <= num_own <= sizes.num_layers:
        raise text.refusal("num_kv_shared_layers", f"it must be at most num_hidden_layers ({sizes.num_layers})")
    is_wide = text.get("use_double_wide_mlp", bool, False) and num_own > 0
    is_two_way = text.raw("use_bidirectional_attention") == "vision"
    shapes: list[LayerShape] = []
    for index, kind in enumerate(kinds):
        kv_heads, head_dim = read_heads(text, sizes, index, kind)
        reads = None
        if index >= num_own > 0:
            if kind not in kinds[:num_own]:
                raise text.refusal("num_kv_shared_layers", f"layer {index} would share the cache of an earlier {kind} "
                                                           "layer, and there is none")
            reads = max(i for i in range(num_own) if kinds[i] == kind)
        reach = RangeReach.WHOLE
        if is_two_way:  # in sliding layers, within the window
            reach = RangeReach.WINDOW if windows[index] is not None else RangeReach.NOTHING
        layer = AttentionLayer(first_layer + index, sizes.num_heads, kv_heads, head_dim, SCALE, windows[index], softcap,
                               writes=index < num_own, reach=reach)
        has_v = kind == SLIDING or not text.get("attention_k_eq_v", bool, False)
        width = sizes.intermediate_size * (2 if is_wide and index >= num_own else 1)
        shapes.append(LayerShape(layer, kind, reads, has_v, width))
    return shapes


def read_heads(text: ConfigReader, sizes: Sizes, index: int, kind: str) -> tuple[int, int]:
    """Read (KV heads, head size) of a layer from its entry in `per_layer_config`, or, for a full layer, from the older
    keys."""
    if text.has("per_layer_config"):
        by_layer = text.section("per_layer_config")
        text.passes_over("num_global_key_value_heads", "global_head_dim")
        key = next((key for key in by_layer.values if str(key).isdecimal() and int(key) == index), None)
        own = ConfigReader({}) if key is None else by_layer.section(key)
        for name in own.values:
            if name not in ("head_dim", "num_key_value_heads"):
                raise own.refusal(name, "only head_dim and num_key_value_heads may differ between layers")
        heads = (own.get("num_key_value_heads", int, sizes.num_kv_heads, least=1),
                 own.get("head_dim", int, sizes.head_dim, least=1))
    elif kind == SLIDING:
        heads = sizes.num_kv_heads, sizes.head_dim
    else:
        own_count = text.get("attention_k_eq_v", bool, False)
        count = sizes.num_kv_heads
        own_kv_heads = text.get("num_global_key_value_heads", int, count, least=1)
        count = own_kv_heads if own_count else count
        heads = count, text.get("global_head_dim", int, 512, least=1)
    if sizes.num_heads % heads[0]:
        raise text.refusal("num_key_value_heads", f"layer {index}: it must divide num_attention_heads "
                                                  f"({sizes.num_heads})")
    return heads
