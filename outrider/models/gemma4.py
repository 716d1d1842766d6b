"""Gemma 4, the language part: sliding and full layers with different heads, keys that serve as values, layers that read
another layer's cache, per-layer embeddings, experts beside the MLP.

Used for text-only checkpoints and for the language model of multimodal ones, whose images `features/images` serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from outrider.cache.groups import LayerCache
from outrider.formats import RankGroup, VocabularyShard
from outrider.kernels import ops
from outrider.kernels.moe import RouteRule
from outrider.kernels.reference import widened
from outrider.layers import (
    Angles,
    DecoderLayer,
    Delta,
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    Module,
    Parameter,
    RMSNorm,
    Rotary,
    Router,
    SelfAttention,
    StepContext,
    Unnormed,
    rope_table,
    rotate,
)
from outrider.mixers import HeadNorms, PagedLayer, WantedRows
from outrider.models.base import Decoder, DecoderNames
from outrider.models.config import FULL, LEAST_SOFTCAP, SLIDING, ConfigReader, Sizes, rope_params
from outrider.models.gemma4_config import ACTIVATION, LayerShape, is_unified, read_shapes, read_sizes
from outrider.models.placeholders import read_placeholders

ROPES = (FULL, SLIDING)  # the order of a model's rotaries
DEFAULT_ROPES: dict[str, dict[str, object]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
# Parts of a multimodal checkpoint beside its language model.
OTHER_PARTS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


class Gemma4Attention(SelfAttention):
    """Attention with norms of q, k and v; the norm of v has no weights. A layer that reads another layer's cache has
    only q."""

    def __init__(
        self, shape: LayerShape, sizes: Sizes, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer, self.has_v = shape.attention, shape.has_v
        super().__init__(layer, sizes.hidden_size, qkv_bias=bias, out_bias=bias, head_norm=None, has_v=shape.has_v,
                         dtype=dtype, device=device)
        self.q_norm, self.k_norm, self.v_norm = (RMSNorm(layer.head_dim, sizes.eps, dtype=dtype, device=device)
                                                 for _ in range(3))
        self.v_norm.weight.fill_(1)

    def parts(self) -> Sequence[tuple[str, Module]]:
        k_norm = [("k_norm", self.k_norm)] if self.layer.writes else []
        return [*super().parts(), ("q_norm", self.q_norm), *k_norm]

    @property
    def norms(self) -> HeadNorms:
        return HeadNorms(self.q_norm.scale, self.k_norm.scale, self.q_norm.eps, norms_v=True, has_v=self.has_v)

    def mix_unfused(self, qkv: torch.Tensor, angles: Angles, paged: PagedLayer) -> torch.Tensor:
        layer, q_size = self.layer, self.layer.num_heads * self.layer.head_dim
        q = rotate(self.q_norm(qkv[:, :q_size].view(-1, layer.num_heads, layer.head_dim)), angles)
        if not layer.writes:
            return paged(q, None, None)
        kv = qkv[:, q_size:].view(-1, 1 + self.has_v, layer.num_kv_heads, layer.head_dim)
        k, v = rotate(self.k_norm(kv[:, 0]), angles), self.v_norm(kv[:, -1])
        return paged(q, k, v)


class PerLayerInputs(Module):
    """The per-layer inputs: a vector for every layer and token, made from a table and from the token's embedding."""

    def __init__(self, vocab_size: int, size: int, sizes: Sizes, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (-1, sizes.num_layers, size)
        width = sizes.num_layers * size
        self.table = Embedding(vocab_size, width, dtype=dtype, device=device, scale=size**0.5)
        self.projection = Linear(sizes.hidden_size, width, bias=False, dtype=dtype, device=device)
        self.projection_scale = sizes.hidden_size**-0.5
        self.norm = RMSNorm(size, sizes.eps, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("embed_tokens_per_layer", self.table),
            ("per_layer_model_projection", self.projection),
            ("per_layer_projection_norm", self.norm),
        )

    def shard(self, group: RankGroup) -> None:
        """Shard the table by tokens. Every other weight is whole on every rank."""
        self.table.declare_shard(VocabularyShard.from_group(group))

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the inputs of all layers: [tokens, layers, size]."""
        projected = self.norm((self.projection(embedded, context) * self.projection_scale).view(self.shape))
        return (projected + self.table.changed(tokens, context).view(self.shape)) * 2.0**-0.5


class PerLayerGate(Module):
    """Computes the addition of one layer's per-layer input to the residual stream. The stream gates the input."""

    def __init__(self, size: int, sizes: Sizes, *, dtype: torch.dtype, device: torch.device) -> None:
        self.gate = Linear(sizes.hidden_size, size, bias=False, dtype=dtype, device=device)
        self.projection = Linear(size, sizes.hidden_size, bias=False, dtype=dtype, device=device)
        self.norm = RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("per_layer_input_gate", self.gate),
            ("per_layer_projection", self.projection),
            ("post_per_layer_input_norm", self.norm),
        )

    def __call__(self, x: torch.Tensor, per_layer_input: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.norm(self.projection(ops.gelu_scale(self.gate(x, context), per_layer_input), context))


class ExpertsBeside(Module):
    """Experts beside the MLP, chosen from the residual stream. Both results are normed and added."""

    def __init__(self, index: int, rule: RouteRule, expert_size: int, sizes: Sizes, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.mlp_norm, self.input_norm, self.output_norm, self.router_norm = (
            RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device) for _ in range(4))
        self.router = Router(index, sizes.hidden_size, rule, has_expert_scale=True, projection="proj",
                             dtype=dtype, device=device)
        self.experts = Experts(rule.num_experts, sizes.hidden_size, expert_size, activation=ACTIVATION, dtype=dtype,
                               device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("post_feedforward_layernorm_1", self.mlp_norm),
            ("pre_feedforward_layernorm_2", self.input_norm),
            ("post_feedforward_layernorm_2", self.output_norm),
            ("router.scale", Parameter(self.router_norm.weight)),
            ("router", self.router),
            ("experts", self.experts),
        )

    def finalize(self) -> None:
        super().finalize()
        self.router_norm.scale = widened(self.router_norm.weight) * self.router_norm.size**-0.5

    def __call__(self, residual: torch.Tensor, dense: torch.Tensor, context: StepContext) -> torch.Tensor:
        routed = self.router(self.router_norm(residual), context)
        return self.mlp_norm(dense) + self.output_norm(self.experts(self.input_norm(residual), routed, context))


class Gemma4Layer(DecoderLayer):
    """Attention and MLP, each between two norms; then the per-layer input; then a scalar that multiplies everything.

    Code here multiplies only the residual stream, because the scalar is folded into the weight of the last norm."""

    def __init__(
        self, shape: LayerShape, sizes: Sizes, *, attention_bias: bool = False, per_layer_size: int = 0,
        experts: ExpertsBeside | None = None, dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.rotary = ROPES.index(shape.kind)
        self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm = (
            RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device) for _ in range(4))
        self.attention = Gemma4Attention(shape, sizes, bias=attention_bias, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            sizes.hidden_size, shape.intermediate_size, activation=ACTIVATION, bias=False, dtype=dtype, device=device
        )
        self.experts = experts
        self.per_layer = PerLayerGate(per_layer_size, sizes, dtype=dtype, device=device) if per_layer_size else None
        self.scalar = torch.ones(1, dtype=dtype, device=device)
        self.factor = 1.0  # the scalar, once loaded

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("input_layernorm", self.input_norm),
            ("self_attn", self.attention),
            ("post_attention_layernorm", self.attention_norm),
            ("pre_feedforward_layernorm", self.mlp_norm),
            ("mlp", self.mlp),
            ("post_feedforward_layernorm", self.output_norm),
            ("layer_scalar", Parameter(self.scalar)),
            *(("", part) for part in (self.experts, self.per_layer) if part is not None),
        )

    def finalize(self) -> None:
        super().finalize()
        self.factor = self.scalar.item()
        last = self.output_norm if self.per_layer is None else self.per_layer.norm
        last.scale = widened(last.weight) * self.factor

    def __call__(
        self, delta: Delta, residual: torch.Tensor, angles: Angles, context: StepContext,
        per_layer_input: torch.Tensor | None = None,
    ) -> tuple[Delta, torch.Tensor]:
        """Compute the layer. per_layer_input: [tokens, size], in models with per-layer inputs."""
        x, residual = self.input_norm.add_norm(delta, residual)
        return self._after_attention(self.attention(x, angles, context), residual, per_layer_input, context)

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[Delta, torch.Tensor]:
        delta, residual, angles, context, *own_input = args
        x, residual = self.input_norm.add_norm(delta, residual)
        attended = self.attention.for_rows(x, angles, context, rows)
        own = own_input[0][rows.token_rows] if own_input else None
        return self._after_attention(attended, residual[rows.token_rows], own, context.of_rows(rows))

    def _after_attention(
        self, attended: torch.Tensor, residual: torch.Tensor, per_layer_input: torch.Tensor | None,
        context: StepContext,
    ) -> tuple[Delta, torch.Tensor]:
        unnormed = Unnormed(attended, self.attention_norm.scale, self.attention_norm.eps)
        x, residual = self.mlp_norm.add_norm(unnormed, residual)
        x = self.mlp(x, context)
        if self.experts is not None:
            x = self.experts(residual, x, context)
        if self.per_layer is None:
            return Unnormed(x, self.output_norm.scale, self.output_norm.eps, self.factor), residual
        assert per_layer_input is not None
        residual = residual.add_(self.output_norm(x))
        added = self.per_layer(residual, per_layer_input, context)
        return added, residual if self.factor == 1.0 else residual.mul_(self.factor)


class ProportionalRotary(Rotary):
    """A rope that rotates only the fastest pairs of a head, each as fast as if all rotated. The other pairs do not
    rotate."""

    def __init__(self, rope: ConfigReader, head_dim: int, *, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = proportional_frequencies(rope, head_dim, wide)
        if device.type == "meta":  # see Rotary
            self.table = torch.empty(max_len, head_dim, dtype=wide, device=device)
        else:
            self.table = rope_table(frequencies, max_len).to(device)


def proportional_frequencies(rope: ConfigReader, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the frequencies [head_dim / 2], 0 for pairs that do not rotate. `layers/rotary.py` explains how they are
    computed."""
    turning = int(rope.get("partial_rotary_factor", float, 1.0) * head_dim // 2)
    if not 0 < turning <= head_dim // 2:
        raise rope.refusal("partial_rotary_factor", "it must be greater than 0 and at most 1")
    theta, factor = rope.required("rope_theta", float), rope.get("factor", float, 1.0)
    if theta <= 1 or factor <= 0:
        raise rope.refusal("rope_theta", "it must be greater than 1, and factor greater than 0")
    exponents = torch.arange(0, 2 * turning, 2, dtype=dtype) / head_dim
    return F.pad(1.0 / theta**exponents / factor, (0, head_dim // 2 - turning))


class Gemma4(Decoder):
    """Model class for Gemma4ForCausalLM, and for the language model of Gemma4ForConditionalGeneration and the unified
    architectures."""

    layers: Sequence[Gemma4Layer]
    may_see = True

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        text = config.text_section()
        self.prefix = "model" if text is config else "model.language_model"
        self.sees = config.raw("vision_config") is not None
        self.pad_id = text.get("pad_token_id", int, 0)  # its per-layer inputs are those of placeholders
        self.placeholders = read_placeholders(config)
        if config.has("tie_word_embeddings"):  # the whole model's key wins
            text = text.with_values({"tie_word_embeddings": config.get("tie_word_embeddings", bool, True)})
        self.names = DecoderNames.below(self.prefix)
        sizes = read_sizes(text)
        super().__init__(text, sizes, dtype=dtype, device=device, embedding_scale=sizes.hidden_size**0.5)
        self.softcap = text.optional("final_logit_softcapping", float, least=LEAST_SOFTCAP)
        self.shapes = read_shapes(text, sizes)
        self.attention_layers = [shape.attention for shape in self.shapes]
        self.rotaries = read_rotaries(text, self.shapes, max_len=max_len or sizes.max_positions, dtype=dtype,
                                      device=device)
        size = text.get("hidden_size_per_layer_input", int, 0 if is_unified(text) else 256)
        self.per_layer = None
        if size:
            vocab_size = text.get("vocab_size_per_layer_input", int, sizes.vocab_size)
            if vocab_size < sizes.vocab_size:
                raise text.refusal("vocab_size_per_layer_input", f"it must be at least vocab_size ({sizes.vocab_size})")
            self.per_layer = PerLayerInputs(vocab_size, size, sizes, dtype=dtype, device=device)
        else:
            text.passes_over("vocab_size_per_layer_input")
        bias = text.get("attention_bias", bool, False)
        self.layers = [
            Gemma4Layer(shape, sizes, attention_bias=bias, per_layer_size=size, dtype=dtype, device=device,
                        experts=read_experts(text, shape.attention.index, sizes, dtype=dtype, device=device))
            for shape in self.shapes
        ]
        suppressed = sorted(set(config.get("suppress_tokens", list[int], [])))
        if suppressed and not 0 <= suppressed[0] <= suppressed[-1] < sizes.vocab_size:
            raise config.refusal("suppress_tokens", f"its token ids must be from 0 to {sizes.vocab_size - 1}")
        self.suppressed = torch.tensor(suppressed, dtype=torch.int64, device=device) if suppressed else None

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), *([] if self.per_layer is None else [(self.prefix, self.per_layer)])]

    def ignores(self, name: str) -> bool:
        if super().ignores(name) or name.startswith(tuple(f"model.{part}." for part in OTHER_PARTS)):
            return True
        found = re.fullmatch(rf"{re.escape(self.prefix)}\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+", name)
        # Layers that read another's cache may have been saved with projections of their own, which are not used.
        return found is not None and int(found[1]) < self.num_layers and self.shapes[int(found[1])].reads is not None

    def cache_layers(self) -> list[LayerCache]:
        return [LayerCache(layer.index, layer.cache_spec(self.dtype.itemsize), shape.reads)
                for layer, shape in zip(self.attention_layers, self.shapes, strict=True)]

    @property
    def last_writer(self) -> int:
        return max((index for index, shape in enumerate(self.shapes) if shape.attention.writes), default=0)

    def owner(self, kind: str) -> LayerShape | None:
        """Return the last layer of a kind that has its own cache. Later layers of this kind read that cache."""
        return next((shape for shape in reversed(self.shapes) if shape.kind == kind and shape.reads is None), None)

    def layer_inputs(self, tokens: torch.Tensor, embedded: torch.Tensor,
                     context: StepContext) -> Sequence[tuple[torch.Tensor, ...]]:
        if self.per_layer is None:
            return super().layer_inputs(tokens, embedded, context)
        if context.given_rows is not None:
            for placeholder in self.placeholders:
                tokens = torch.where(tokens == placeholder, self.pad_id, tokens)
        return [(own,) for own in self.per_layer(tokens, embedded, context).unbind(1)]

    def limited(self, logits: torch.Tensor) -> torch.Tensor:
        return self.without_suppressed(super().limited(logits))

    def without_suppressed(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid the tokens that the model must not write, such as placeholders of images."""
        return logits if self.suppressed is None else logits.index_fill_(1, self.suppressed, -torch.inf)


def read_experts(text: ConfigReader, index: int, sizes: Sizes, *, dtype: torch.dtype,
                 device: torch.device) -> ExpertsBeside | None:
    if not text.get("enable_moe_block", bool, False):
        text.passes_over("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    count, top_k = text.required("num_experts", int), text.required("top_k_experts", int)
    if not 1 <= top_k <= count:
        raise text.refusal("top_k_experts", f"it must be from 1 to num_experts ({count})")
    expert_size = text.required("moe_intermediate_size", int)
    return ExpertsBeside(index, RouteRule(count, top_k), expert_size, sizes, dtype=dtype, device=device)


def read_rotaries(text: ConfigReader, shapes: list[LayerShape], *, max_len: int, dtype: torch.dtype,
                  device: torch.device) -> list[Rotary]:
    """Build a rotary for each kind of layer, in the order of ROPES. The rotary of a kind that no layer has gets the
    first layer's head size and is not used."""
    given = text.section_or_empty("rope_parameters")
    rotaries: list[Rotary] = []
    for kind in ROPES:
        sizes = {shape.attention.head_dim for shape in shapes if shape.kind == kind} or {shapes[0].attention.head_dim}
        if len(sizes) > 1:
            raise text.refusal("per_layer_config", f"all {kind} layers must have the same head size")
        rope = given.section(kind) if given.raw(kind) else ConfigReader(DEFAULT_ROPES[kind], f"{given.source}: {kind}")
        if rope.raw("rope_type") == "proportional":
            rotaries.append(ProportionalRotary(rope, sizes.pop(), max_len=max_len, dtype=dtype, device=device))
        else:
            theta = DEFAULT_ROPES[kind]["rope_theta"]
            assert isinstance(theta, float)
            rotaries.append(Rotary(rope_params(text, rope, sizes.pop(), theta), max_len=max_len, dtype=dtype,
                                   device=device))
    return rotaries
