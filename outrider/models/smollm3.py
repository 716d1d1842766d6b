"""SmolLM3: Llama in which every fourth layer has no rope."""

from __future__ import annotations

from outrider.models.config import FULL, SLIDING, ConfigReader, layer_windows
from outrider.models.llama import Llama


class SmolLM3(Llama):
    """Model class for SmolLM3ForCausalLM."""

    default_theta = 2_000_000.0
    default_tied = True

    def layers_without_rope(self, config: ConfigReader, windows: list[int | None]) -> set[int]:
        return read_unturned(config)

    def windows(self, config: ConfigReader) -> list[int | None]:
        """Return the window of each layer: none unless `use_sliding_window` is set. Otherwise `layer_types` says which
        layers slide, or those without a rope do."""
        if not config.get("use_sliding_window", bool, False) or not config.has("sliding_window"):
            config.passes_over("sliding_window", "max_window_layers")
            return super().windows(config)
        unturned = read_unturned(config)
        kinds = [SLIDING if index in unturned else FULL for index in range(self.num_layers)]
        return layer_windows(config, config.get("layer_types", list, kinds))


def read_unturned(config: ConfigReader) -> set[int]:
    """Read the layers without a rope: the zeros of `no_rope_layers`, or every n-th layer."""
    num_layers = config.required("num_hidden_layers", int)
    interval = config.get("no_rope_layer_interval", int, 4, least=1)
    turned = config.get("no_rope_layers", list[int], [int((i + 1) % interval != 0) for i in range(num_layers)])
    if len(turned) < num_layers:
        raise config.refusal("no_rope_layers", f"it must have one entry for each of the {num_layers} layers "
                                               "(num_hidden_layers)")
    return {index for index in range(num_layers) if not turned[index]}
