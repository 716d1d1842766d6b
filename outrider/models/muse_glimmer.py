"""Muse Glimmer, text only: Gemma's layers with a gate on the output of attention. The embedding is normed, norms of q
and k have no weights, and every fourth layer has neither a window nor a rope.
"""

from __future__ import annotations

import torch

from outrider.kernels import ops
from outrider.kernels.reference import widened
from outrider.layers import (
    Embedding,
    FusedLinear,
    OutputGatedAttention,
    RMSNorm,
    Rotary,
    StepContext,
    StillRotary,
    UnscaledHeadNorm,
)
from outrider.mixers import AttentionLayer
from outrider.models.base import Decoder, DecoderNames
from outrider.models.config import (
    FULL,
    LEAST_SOFTCAP,
    SLIDING,
    ConfigReader,
    Sizes,
    layer_windows,
    read_rope,
    refuse_unsupported,
)
from outrider.models.gemma3 import SandwichLayer
from outrider.models.sources.quantization import KEY

OTHER_PARTS = "model.vision_"  # tensors of the tower, and of what is between it and the language model


class NormedEmbedding(Embedding):
    """An embedding that norms its rows, without weights. Drafters look up the rows without the norm, as the files store
    them."""

    def __init__(self, vocab_size: int, hidden_size: int, eps: float, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(vocab_size, hidden_size, dtype=dtype, device=device)
        self.ones, self.eps = widened(torch.ones(hidden_size, dtype=dtype, device=device)), eps

    def changed(self, tokens: torch.Tensor, context: StepContext) -> torch.Tensor:
        return ops.rms_norm(super().changed(tokens, context), self.ones, self.eps)


class GlimmerAttention(OutputGatedAttention):
    """Attention with a gate for every feature of its output, and norms of q and k heads without weights."""

    def __init__(self, layer: AttentionLayer, hidden_size: int, eps: float, *, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        norm = UnscaledHeadNorm(layer.num_heads, layer.num_kv_heads, layer.head_dim, eps, dtype=dtype, device=device)
        super().__init__(layer, hidden_size, qkv_bias=bias, out_bias=bias, head_norm=norm, dtype=dtype, device=device)
        stored = {"gate_proj": layer.num_heads * layer.head_dim} | self.qkv.stored
        self.qkv = FusedLinear(hidden_size, stored, bias=bias, dtype=dtype, device=device)


class MuseGlimmer(Decoder):
    """Model class for MuseGlimmerForConditionalGeneration."""

    names = DecoderNames.below("model.language_model")

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config = _text_part(config)
        refuse_unsupported(config, key="hidden_activation")
        config.must_equal("attention_bias", False, default=False)
        sizes = Sizes.read(config, head_dim=128, eps=1e-5)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.embed_tokens = NormedEmbedding(sizes.vocab_size, sizes.hidden_size, sizes.eps, dtype=dtype, device=device)
        self.softcap = config.get("final_logit_softcapping", float, 20.0, least=LEAST_SOFTCAP)
        self.logit_scale = config.get("output_multiplier", float, 0.19611613513818404)
        self.rotaries = self._read_rotaries(max_len)
        self.attention_layers = [self.attention_layer(*layer) for layer in enumerate(self._windows())]
        self.layers = [self._layer(layer, still) for layer, still in
                       zip(self.attention_layers, self._layers_without_rope(), strict=True)]

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        sizes = self.sizes
        scale = sizes.head_dim**-0.5 * self.config.get("qk_scale_factor", float, 3.87)
        return AttentionLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, scale, window)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith(OTHER_PARTS)

    def _layer(self, layer: AttentionLayer, has_no_rope: bool) -> SandwichLayer:
        options = {"dtype": self.dtype, "device": self.device}
        inner_eps, outer_eps = self.sizes.eps, self.config.get("post_norm_eps", float, 1e-8, least=0)
        norms = [RMSNorm(self.hidden_size, eps, offset=True, **options)
                 for eps in (inner_eps, outer_eps, inner_eps, outer_eps)]
        attention = GlimmerAttention(layer, self.hidden_size, inner_eps, bias=False, **options)
        made = SandwichLayer(attention, self.make_mlp(self.sizes.intermediate_size), norms)
        made.rotary = int(has_no_rope)
        return made

    def _read_rotaries(self, max_len: int | None) -> list[Rotary]:
        """Return the rope, and one that rotates by zero."""
        still = StillRotary(self.sizes.head_dim, max_len=max_len or self.max_positions, dtype=self.dtype,
                            device=self.device)
        return [self.make_rotary(read_rope(self.config, self.sizes.head_dim), max_len), still]

    def _windows(self) -> list[int | None]:
        kinds = [FULL if is_last else SLIDING for is_last in self._last_of_four()]
        return layer_windows(self.config, self.config.get("layer_types", list, kinds))

    def _layers_without_rope(self) -> list[bool]:
        """Return, for each layer, whether it has no rope: those whose theta is 0. The others share one theta."""
        config = self.config
        if not config.has("layer_rope_theta"):
            return self._last_of_four()
        thetas, key = config.required("layer_rope_theta", list[float]), "layer_rope_theta"
        if len(thetas) != self.num_layers or set(thetas) - {0, read_rope(config, self.sizes.head_dim).theta}:
            raise config.refusal(key, f"it must have one number for each of the {self.num_layers} layers: 0, or "
                                      "rope_theta")
        return [theta == 0 for theta in thetas]

    def _last_of_four(self) -> list[bool]:
        """Return, for each layer, whether it is the last of four, counted from the end."""
        return [(self.num_layers - 1 - index) % 4 == 0 for index in range(self.num_layers)]


def _text_part(config: ConfigReader) -> ConfigReader:
    """Return the language model's section, with those keys of the whole model's config that apply to it."""
    text = config.text_section()
    config.passes_over("out_hidden_size", "projector_hidden_size", "projector_hidden_act")
    tied = config.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, False))
    own = {KEY: config.get(KEY, dict, {})} if config.has(KEY) else {}
    return text.with_values({"tie_word_embeddings": tied, **own})
