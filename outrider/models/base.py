"""What the engine and draft heads may ask of a model, and the loop that decoders share.

A model knows its weights and its arithmetic. It knows nothing of pages, batches or sampling: attention goes
through `attend`, and token rows of different requests never meet anywhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from outrider.cache.groups import LayerCache
from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.layers.embedding import Embedding
from outrider.layers.linear import Linear, WeightSlot
from outrider.layers.norm import Delta, RMSNorm, stream
from outrider.layers.rotary import Angles, Rotary
from outrider.mixers.cached import Attend
from outrider.mixers.paged.base import AttentionLayer
from outrider.models.config import ConfigReader, Sizes


class Hidden(NamedTuple):
    """What a forward leaves behind, all [tokens, hidden]."""

    final: torch.Tensor  # after the final norm: what `logits` takes
    before_norm: torch.Tensor
    taps: tuple[torch.Tensor, ...]  # the residual stream after the layers asked for, in the order asked


class Model(ABC):
    """A constructor takes (config: ConfigReader, *, dtype, device, max_len) and leaves the weights to the loader."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int  # as the config says; max_len of an engine may be less
    dtype: torch.dtype
    device: torch.device
    attention_layers: list[AttentionLayer]
    embed_tokens: Embedding
    lm_head: Linear

    @abstractmethod
    def weights(self) -> dict[str, WeightSlot]:
        """Every tensor of the checkpoint, by its Hugging Face name."""

    @abstractmethod
    def finalize(self) -> None:
        """Once, after loading and before the first forward; the loader does it."""

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, taps: tuple[int, ...] = ()
    ) -> Hidden:
        """tokens, positions: [tokens] int64. Tap i is the residual stream after i layers; 0 is the embedding."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] after the final norm. Returns [n, vocabulary] float32, float64 in a float64 model."""

    def ignores(self, name: str) -> bool:
        """A checkpoint may hold this tensor and the model does not need it."""
        return name.endswith("rotary_emb.inv_freq")

    def cache_layers(self) -> list[LayerCache]:
        return [LayerCache(layer.index, self._cache_spec(layer)) for layer in self.attention_layers]

    def _cache_spec(self, layer: AttentionLayer) -> FullSpec:
        geometry = (layer.num_kv_heads, layer.head_dim, self.dtype.itemsize)
        return FullSpec(*geometry) if layer.window is None else SlidingSpec(*geometry, layer.window)


class DecoderLayer(Protocol):
    """A layer adds to the residual stream; the next one's first norm carries the sum out, so that both can be fused."""

    rotary: int  # which of the model's ropes it uses

    def __call__(
        self, delta: Any, residual: torch.Tensor, angles: Angles, attend: Attend
    ) -> tuple[Any, torch.Tensor]:
        """Returns (what this layer's last part adds, the residual stream before it); None if it is added already. What
        one layer hands on (a `layers.norm.Delta`) only layers of its family must understand, and `RMSNorm.add_norm`."""
        ...

    def weights(self, prefix: str) -> dict[str, WeightSlot]: ...

    def finalize(self) -> None: ...


class Decoder(Model):
    """Embedding, layers, norm, head. A family fills `layers`, `rotaries`, `norm` and `attention_layers`."""

    layers: Sequence[DecoderLayer]
    rotaries: list[Rotary]
    norm: RMSNorm
    softcap: float | None = None  # of the logits

    def __init__(
        self,
        config: ConfigReader,
        sizes: Sizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
        embedding_scale: float | None = None,
    ) -> None:
        self.config = config
        self.sizes = sizes
        self.vocab_size = sizes.vocab_size
        self.hidden_size = sizes.hidden_size
        self.num_layers = sizes.num_layers
        self.max_positions = sizes.max_positions
        self.dtype = dtype
        self.device = device
        self.embed_tokens = Embedding(
            sizes.vocab_size, sizes.hidden_size, dtype=dtype, device=device, scale=embedding_scale
        )
        if sizes.is_tied:
            self.lm_head = Linear.sharing(self.embed_tokens.weight)
        else:
            self.lm_head = Linear(sizes.hidden_size, sizes.vocab_size, bias=False, dtype=dtype, device=device)

    def weights(self) -> dict[str, WeightSlot]:
        slots = self.embed_tokens.weights("model.embed_tokens") | self.norm.weights("model.norm")
        if self.sizes.is_tied:
            slots |= self.lm_head.weights("model.embed_tokens")  # the same tensor; the head may keep its bits too
        for index, layer in enumerate(self.layers):
            slots |= layer.weights(f"model.layers.{index}")
        return slots if self.sizes.is_tied else slots | self.lm_head.weights("lm_head")

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or (self.sizes.is_tied and name == "lm_head.weight")

    def finalize(self) -> None:
        for layer in self.layers:
            layer.finalize()
        self.norm.finalize()
        self.lm_head.finalize()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, taps: tuple[int, ...] = ()
    ) -> Hidden:
        assert all(0 <= tap <= self.num_layers for tap in taps), f"taps {taps} of {self.num_layers} layers"
        angles = [rotary.at(positions) for rotary in self.rotaries]
        residual = self.embed_tokens(tokens)
        delta: Delta = None
        seen: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                seen[index] = stream(delta, residual)
            delta, residual = layer(delta, residual, angles[layer.rotary], attend)
        final, before_norm = self.norm.add_norm(delta, residual)
        seen[self.num_layers] = before_norm
        return Hidden(final, before_norm, tuple(seen[tap] for tap in taps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.wide(hidden)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
