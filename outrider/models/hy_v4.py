"""HY-V4 (Hy4): latent attention over positions that some layers choose, with sinks and gates; several residual streams;
experts with limits beside a shared one after the first layer.

A layer adds to every stream and does not mix them. The prediction module has one stream: it reads the final state. The
ropes of the publisher's engines rotate pairs of dimensions, and those of transformers rotate halves. The published
weights were trained with pairs, so pairs are the default here; `rope_interleave` and `indexer_rope_interleave` in a
config override this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.formats import ModelSize, OutputShard, RankGroup, Ranks
from outrider.kernels import ops
from outrider.kernels.activations import limited_silu
from outrider.kernels.streams import StreamRule
from outrider.layers import (
    DecoderLayer,
    LatentAttention,
    LatentShape,
    Linear,
    Module,
    Parameter,
    PreNormLayer,
    StepContext,
)
from outrider.layers.base import HeldRows
from outrider.layers.hyper_connections import HyperConnection, HyperLayer
from outrider.mixers import AttendsTo, IndexedPositions, LatentLayer
from outrider.models.config import ConfigReader
from outrider.models.deepseek_v3 import FULL_INDEX, SHARED_INDEX, DeepseekV32

MODULES = "model.mtp_layers"  # the prediction modules in the checkpoint
STREAM_PARTS = ("fn", "base", "scale")
INDEX_PERIOD = 4  # layers behind the first, of which the first chooses positions, in configs that do not say


class SinkGateAttention(LatentAttention):
    """Latent attention with a sink for every head and a sigmoid gate for every value."""

    _held: HeldRows | None = None

    def __init__(self, layer: LatentLayer, shape: LatentShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layer, shape, dtype=dtype, device=device)
        self.gate = Linear(shape.hidden_size, layer.num_heads * shape.value_dim, bias=False, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        assert self.layer.sinks is not None
        sinks = Parameter(self.layer.sinks, self._held)
        return [*super().parts(), ("linear_gate", self.gate), ("learnable_sink_param", sinks)]

    def shard(self, group: RankGroup) -> None:
        ranks, num_heads = Ranks.from_group(group), self.layer.num_heads
        self._held = HeldRows(num_heads, (ranks.share(ModelSize(num_heads)),))
        super().shard(group)
        self.gate.declare_shard(OutputShard(ranks))

    def leave(self, values: torch.Tensor, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return super().leave(ops.sigmoid_scale(values, self.gate(x, context)), x, context)


class HYV4(DeepseekV32):
    """Model class for HYV4ForCausalLM."""

    fixed = (("enable_ihc", True), ("learnable_sink", True), ("gated_mla", True), ("gating_type", "elementwise"),
             ("tie_word_embeddings", False))
    defaults = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    default_eps = 1e-5
    default_routed_scale = 2.827

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        # The head's product is always summed in float32; the others are values at the beginning of training, and a
        # size that the parts of a head say.
        config.passes_over("enable_lm_head_fp32", "learnable_sink_init", "head_dim", "num_key_value_heads")
        config = _with_defaults(config)
        self.num_streams = config.get("hc_mult", int, 4, least=2)
        if self.num_streams & (self.num_streams - 1):
            raise config.refusal("hc_mult", "it must be a power of two, because the kernels divide a token row by it")
        limit = config.get("swiglu_limit", float, 10.0)
        self.expert_activation = limited_silu(limit) if limit > 0 else None
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)
        self.stream_end = self._connection("hc_head_", writes=False)

    def _read_shape(self) -> LatentShape:
        config = self.config
        return replace(
            super()._read_shape(),
            rotates_pairs=config.get("rope_interleave", bool, True),
            index_rotates_pairs=config.get("indexer_rope_interleave", bool, True),
            index_rope_at_end=True,
            index_eps=self.sizes.eps,
        )

    def latent_layer(self, index: int, attends_to: AttendsTo) -> LatentLayer:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = torch.empty(self.sizes.num_heads, dtype=wide, device=self.device)
        return replace(super().latent_layer(index, attends_to), sinks=sinks)

    def layer(self, attention: LatentLayer, is_sparse: bool) -> DecoderLayer:
        halves = [self._connection(f"hc_{half}_layer.hc_pre.hc_") for half in ("attn", "mlp")]
        return HyperLayer(halves[0], self.make_norm(), self._attention(attention), halves[1], self.make_norm(),
                          self.feed_forward(attention.index, is_sparse))

    def predicting_layer(self, index: int, lasts_for_drafting: bool) -> tuple[DecoderLayer, LatentLayer]:
        """Return the layer of a prediction module: one stream, with the experts and the indexer of other layers."""
        attends_to: IndexedPositions = replace(self.indexed_positions(), lasts_for_drafting=lasts_for_drafting)
        latent = self.latent_layer(index, attends_to)
        return PreNormLayer(self.make_norm(), self._attention(latent), self.make_norm(),
                            self.feed_forward(index, is_sparse=True)), latent

    def _attention(self, layer: LatentLayer) -> SinkGateAttention:
        return SinkGateAttention(layer, self.shape, dtype=self.dtype, device=self.device)

    def _connection(self, prefix: str, writes: bool = True) -> HyperConnection:
        config = self.config
        eps = config.get("hc_eps", float, 1e-6)
        rule = StreamRule(self.num_streams, self.sizes.eps, eps, config.get("hc_magnitude", float, 2.0), post_eps=eps,
                          writes=writes)
        matrix, base, scale = (f"{prefix}{part}" for part in STREAM_PARTS)
        return HyperConnection(self.hidden_size, rule, (matrix, base, scale), dtype=self.dtype, device=self.device,
                               keeps_float32=True)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("model.hc_head", self.stream_end)]

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith(f"{MODULES}.")

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. It accepts published names, names of transformers' modules, and the
        names in files that transformers writes."""
        return published_name(name)

    # Streams

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.repeat(1, self.num_streams)

    def aux_state(self, delta: None, residual: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary state: the mean of the streams."""
        return residual.unflatten(1, (self.num_streams, -1)).mean(dim=1)

    def end(self, delta: Any, residual: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        read, _ = self.stream_end.read(residual)
        return self.norm(read), residual


def published_name(name: str) -> str:
    """Return the name of a tensor in the published files."""
    for half, theirs in (("attn", "attn_hc"), ("mlp", "ffn_hc")):
        for part in STREAM_PARTS:
            for other in (f".{theirs}.{part}", f".hc_pre.hc_{half}_layer.hc_{part}", f".hc_{half}_layer.hc_{part}"):
                if name.endswith(other):
                    return f"{name.removesuffix(other)}.hc_{half}_layer.hc_pre.hc_{part}"
    if name.startswith(("model.hc_head.hc_", "model.hc_pre.hc_head.hc_head_")):
        return f"model.hc_head.hc_head_{name.rpartition('_')[2]}"
    gates, to = ("self_attn.gate_proj.", "self_attn.linear_gate.") if ".self_attn." in name else (
        "linear_gate.", "gate_proj.")  # in an MLP, where transformers gives it the name of an attention's gate
    name = name.replace(gates, to)
    return f"{name.removesuffix('sinks')}learnable_sink_param" if name.endswith(".self_attn.sinks") else name


def _with_defaults(config: ConfigReader) -> ConfigReader:
    """Return the config, completed by the publisher's default patterns of layers."""
    layers = range(config.required("num_hidden_layers", int))
    values: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None}
    if not config.has("indexer_types"):
        values["indexer_types"] = [SHARED_INDEX if i and (i - 1) % INDEX_PERIOD else FULL_INDEX for i in layers]
    if not config.has("mlp_layer_types") and not config.has("first_k_dense_replace"):
        values["first_k_dense_replace"] = 1
    return config.with_values(values)
