"""HybridDecoder: the base class of models with recurrent layers beside attention, and the config keys that they share.
"""

from __future__ import annotations

from outrider.cache.groups import LayerCache
from outrider.layers import RopeParams
from outrider.models.base import Decoder
from outrider.models.config import ConfigError, ConfigReader, read_rope

LINEAR = "linear_attention"
MTP_PREFIX = "mtp."  # prefix of a drafter's tensors in the checkpoint, which the target ignores


class HybridDecoder(Decoder):
    def cache_layers(self) -> list[LayerCache]:
        claims = [LayerCache(index, mixer.spec) for index, mixer in self.recurrent_layers.items()]
        return sorted(super().cache_layers() + claims, key=lambda claim: claim.layer)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith(MTP_PREFIX)


def pass_over_components(config: ConfigReader) -> None:
    """Ignore keys that say which of a rope's frequencies use which of a position's three components. In text the three
    are equal."""
    config.section_or_empty("rope_parameters").passes_over("mrope_section", "mrope_interleaved")


def partial_rope(config: ConfigReader, head_dim: int, factor: float) -> RopeParams:
    """Return a rope on the leading part of each head. factor: the default share of a head that rotates."""
    rope = config.section_or_empty("rope_parameters")
    factor = rope.get("partial_rotary_factor", float, config.get("partial_rotary_factor", float, factor))
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(f"{config.source}: partial_rotary_factor={factor} is not supported; it must make an even "
                          f"number of a head's {head_dim} dimensions rotate, and it makes {rotary_dim} of them rotate. "
                          "Correct it")
    whole = {key: value for key, value in rope.values.items() if key != "partial_rotary_factor"}
    return read_rope(config.with_values({"rope_parameters": whole, "partial_rotary_factor": None}), rotary_dim)


def read_limits(config: ConfigReader, key: str) -> tuple[float, float]:
    """Read a lower and an upper limit. JSON has no infinity, so files write it in several other ways."""
    limits = config.get(key, list, [0.0, "inf"])
    values = [item["__float__"] if isinstance(item, dict) and "__float__" in item else item for item in limits]
    try:
        low, high = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise config.refusal(key, "it must be two numbers") from error
    return low, high
