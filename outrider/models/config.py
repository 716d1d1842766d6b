"""The keys of Hugging Face configs that families share: sizes, layer types, rope. Each family reads its other keys.

Unsupported settings are refused by key and value.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.layers import FREQUENCIES, RopeParams
from outrider.models.config_reader import ConfigError as ConfigError
from outrider.models.config_reader import ConfigReader as ConfigReader
from outrider.models.sources.quantization import KEY, read_quantization

FULL, SLIDING = "full_attention", "sliding_attention"
LEAST_SOFTCAP = 1e-3  # a cap is divided by; no cap is null
MAX_REACH = 1 << 24  # positions that a rope's scaling may be made for


@dataclass(frozen=True)
class Sizes:
    """The sizes that every decoder has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    is_tied: bool

    @classmethod
    def read(cls, config: ConfigReader, *, head_dim: int | None = None, is_tied: bool = False,
             eps: float = 1e-6) -> Sizes:
        """Read the sizes. head_dim, is_tied, eps: the family's defaults for configs without the key. If head_dim is
        None, its default is derived from the other sizes."""
        hidden_size = config.required("hidden_size", int)
        num_heads = config.required("num_attention_heads", int)
        num_kv_heads = config.get("num_key_value_heads", int, num_heads, least=1)
        if num_heads % num_kv_heads:
            raise config.refusal("num_key_value_heads", f"it must divide num_attention_heads ({num_heads})")
        head_dim = config.get("head_dim", int, head_dim or hidden_size // num_heads, least=1)
        if not head_dim:
            raise config.refusal("hidden_size", f"without head_dim it must be at least {num_heads} (one per head)")
        return cls(
            vocab_size=config.required("vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=config.required("intermediate_size", int, least=0),
            num_layers=config.required("num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=config.required("max_position_embeddings", int),
            eps=config.get("rms_norm_eps", float, eps, least=0, most=1),
            is_tied=config.get("tie_word_embeddings", bool, is_tied),
        )


def refuse_unsupported(config: ConfigReader, activation: str = "silu", key: str = "hidden_act") -> None:
    """Refuse settings for arithmetic that no model here implements, and any activation other than the family's. key:
    the config's key for the activation."""
    if quantization := config.get(KEY, dict, {}):
        try:
            read_quantization(quantization)
        except ValueError as error:
            raise config.refusal(KEY, str(error), "") from None
    config.must_equal(key, activation, default=activation)


def layer_windows(config: ConfigReader, layer_types: list[str]) -> list[int | None]:
    """Return the window of each layer, by the layer's type. None for layers that see the whole context."""
    num_layers = config.required("num_hidden_layers", int)
    if len(layer_types) != num_layers:
        raise config.refusal("layer_types", f"it must list the kind of each of the {num_layers} layers "
                                            "(num_hidden_layers)")
    if any(kind not in (FULL, SLIDING) for kind in layer_types):
        raise config.refusal("layer_types", f"supported types are {FULL} and {SLIDING}")
    if SLIDING not in layer_types:
        return [None] * num_layers
    window = config.required("sliding_window", int)
    return [window if kind == SLIDING else None for kind in layer_types]


def read_rope(config: ConfigReader, head_dim: int, theta: float = 10000.0) -> RopeParams:
    """Read the rope of a model with one rope, from `rope_parameters` or from the older `rope_scaling` and `rope_theta`.
    theta: the family's default."""
    key = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    return rope_params(config, config.section_or_empty(key), head_dim, config.get("rope_theta", float, theta))


def rope_params(config: ConfigReader, rope: ConfigReader, head_dim: int, theta: float) -> RopeParams:
    """Read a rope. `rope`: the dict that describes it; `theta`: the default for a dict without a theta."""
    type_key = "rope_type" if rope.has("rope_type") else "type"
    rope.passes_over("type", "finetuned")  # newer files have both names of the type
    max_positions = config.required("max_position_embeddings", int)
    kind = rope.must_equal(type_key, *FREQUENCIES, default="default")
    original_len = rope.get("original_max_position_embeddings", int, max_positions, least=1)
    if kind == "dynamic":
        original_len = max_positions  # its scaling starts where the config's positions end
    elif kind in ("llama3", "yarn", "longrope"):
        original_len = config.get("original_max_position_embeddings", int, original_len, least=1)
    for reader in (config, rope):
        reader.must_equal("partial_rotary_factor", 1, default=1)
    params = RopeParams(
        kind=kind,
        theta=rope.get("rope_theta", float, theta),
        rotary_dim=head_dim,
        original_len=original_len,
        factor=_rope_factor(rope, kind, max_positions / original_len),
        low_freq_factor=rope.required("low_freq_factor", float) if kind == "llama3" else 1.0,
        high_freq_factor=rope.required("high_freq_factor", float) if kind == "llama3" else 4.0,
        beta_fast=rope.get("beta_fast", float, 32.0),
        beta_slow=rope.get("beta_slow", float, 1.0),
        attention_factor=rope.optional("attention_factor", float),
        mscale=rope.optional("mscale", float),
        mscale_all_dim=rope.optional("mscale_all_dim", float),
        truncate=rope.get("truncate", bool, True),
        divisors=_divisors(rope, "short_factor", head_dim) if kind == "longrope" else (),
        long_divisors=_divisors(rope, "long_factor", head_dim) if kind == "longrope" else (),
    )
    for key, value, least in (("rope_theta", params.theta, 1), ("factor", params.factor, 0),
                              ("beta_fast", params.beta_fast, 0), ("beta_slow", params.beta_slow, 0),
                              ("low_freq_factor", params.low_freq_factor, 0)):
        if value <= least:
            raise ConfigError(f"{rope.source}: {key}={value} is not supported; it must be greater than {least}. "
                              "Correct it")
    if params.reach > MAX_REACH:
        raise rope.refusal("factor", f"the rope would reach {params.reach} positions, and at most {MAX_REACH} are "
                                     "supported")
    if params.high_freq_factor < params.low_freq_factor:
        raise rope.refusal("high_freq_factor", f"it must be at least low_freq_factor ({params.low_freq_factor})")
    return params


def _rope_factor(rope: ConfigReader, kind: str, stretch: float) -> float:
    match kind:
        case "linear" | "llama3":
            return rope.required("factor", float)
        case "yarn" | "longrope":
            return rope.get("factor", float, stretch)
        case _:  # a dynamic rope is served within its original length alone, where nothing is scaled
            rope.passes_over("factor")
            return 1.0


def _divisors(rope: ConfigReader, key: str, rotary_dim: int) -> tuple[float, ...]:
    given = rope.required(key, list[float])
    if len(given) != rotary_dim // 2 or min(given) <= 0:
        raise rope.refusal(key, f"it must be {rotary_dim // 2} numbers greater than 0, one for each frequency")
    return tuple(map(float, given))
