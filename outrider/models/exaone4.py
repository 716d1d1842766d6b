"""EXAONE 4: norms after attention and MLP, and norms of q and k heads. In models with sliding layers, only the sliding
layers have a rope.
"""

from __future__ import annotations

from outrider.layers import DecoderLayer, PostNormLayer
from outrider.mixers import AttentionLayer
from outrider.models.config import FULL, SLIDING, ConfigReader, layer_windows
from outrider.models.llama import Llama

LETTERS = {"L": SLIDING, "G": FULL}


class Exaone4(Llama):
    """Model class for Exaone4ForCausalLM."""

    default_eps = 1e-5
    has_head_norm = True

    def windows(self, config: ConfigReader) -> list[int | None]:
        return layer_windows(config, config.get("layer_types", list, read_pattern(config)))

    def layers_without_rope(self, config: ConfigReader, windows: list[int | None]) -> set[int]:
        if not config.has("sliding_window"):
            return set()
        return {index for index, window in enumerate(windows) if window is None}

    def make_layer(self, layer: AttentionLayer) -> DecoderLayer:
        made = PostNormLayer(self.make_attention(layer), self.make_norm(), self.make_feed_forward(layer.index),
                             self.make_norm())
        made.rotary = int(layer.index in self.without_rope)
        return made

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        return False, False, False


def read_pattern(config: ConfigReader) -> list[str]:
    """Read the kind of each layer from `sliding_window_pattern`: a number n, if every n-th layer is full, or a pattern
    of letters that repeats."""
    num_layers, pattern = config.required("num_hidden_layers", int), config.raw("sliding_window_pattern")
    if not config.has("sliding_window"):
        return [FULL] * num_layers
    if isinstance(pattern, str) and pattern and not set(pattern) - set(LETTERS):
        kinds = [LETTERS[pattern[index % len(pattern)]] for index in range(num_layers)]
        return [*kinds[:-1], FULL]
    every = config.get("sliding_window_pattern", int, 4, least=1)
    return [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]
