"""NemotronH: every layer has one part, named by a pattern: Mamba-2, attention without positions, MLP or experts.

A layer adds part(norm(x)) to the residual stream. MLPs and experts have no gate: down(relu(up(x)) squared).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.formats import InputShard, LinearFormat, OutputShard, RankGroup, Ranks
from outrider.kernels import moe
from outrider.layers import (
    INNER_KEYS,
    Angles,
    DecoderLayer,
    Experts,
    FeedForward,
    Linear,
    Mamba2,
    Mamba2Shape,
    Module,
    MoE,
    RMSNorm,
    RopeParams,
    Router,
    SelfAttention,
    ShardSize,
    StepContext,
    TokenMixer,
)
from outrider.mixers import PagedLayer, WantedRows
from outrider.models.base import DecoderNames
from outrider.models.config import FULL, ConfigReader, Sizes, refuse_unsupported
from outrider.models.hybrid import LINEAR, HybridDecoder, read_limits

ACTIVATION = "relu2"
MLP, MOE = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
EXPERT_KEYS = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "n_shared_experts",
               "routed_scaling_factor", "moe_intermediate_size", "moe_latent_size",
               "moe_shared_expert_intermediate_size")
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}


class UnplacedAttention(SelfAttention):
    """Attention without a rope: positions have no effect except through the causal mask."""

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        layer = self.layer
        q, k, v = qkv.unflatten(1, (-1, layer.head_dim)).split(
            (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1
        )
        paged: PagedLayer = context.attend.mixer(layer.index)
        return paged(q, k, v)

    def mix_rows(self, x: torch.Tensor, angles: Angles, context: StepContext, rows: WantedRows) -> torch.Tensor | None:
        layer = self.layer
        if layer.index not in rows.layers:
            return None
        q_size, heads = layer.num_heads * layer.head_dim, (-1, layer.head_dim)
        paged: PagedLayer = context.attend.mixer(layer.index)
        paged.write(*self.qkv.part(x, q_size, self.qkv.out_features, context).unflatten(1, heads).chunk(2, dim=1))
        own: PagedLayer = rows.mixer(layer.index)
        q = self.qkv.part(x[rows.token_rows], 0, q_size, context.of_rows(rows))
        return own(q.unflatten(1, heads), None, None)


class PlainMLP(FeedForward):
    """An MLP without a gate: down(relu(up(x)) squared)."""

    def __init__(self, hidden_size: int, width: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.up = Linear(hidden_size, width, bias=bias, dtype=dtype, device=device)
        self.down = Linear(width, hidden_size, bias=bias, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("up_proj", self.up), ("down_proj", self.down)

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(INNER_KEYS, self.down.declared.in_features),)

    def shard(self, group: RankGroup) -> None:
        """Shard the inner features over the ranks."""
        self.up.declare_shard(OutputShard(Ranks.from_group(group)))
        self.down.declare_shard(InputShard.from_group(group))

    def readers(self) -> Sequence[LinearFormat]:
        return (self.up.format,)

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.down(self.up.activated(x, ACTIVATION, context), context)


class NemotronHLayer(DecoderLayer):
    """A layer with a single part, such as attention or an MLP: x + part(norm(x))."""

    def __init__(self, norm: RMSNorm, part: TokenMixer | FeedForward) -> None:
        self.norm, self.part = norm, part

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("norm", self.norm), ("mixer", self.part)

    def prepare(self) -> None:
        self.norm.round_for(*self.part.readers())

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.norm.add_norm(delta, residual)
        if isinstance(self.part, TokenMixer):
            return self.part(x, angles, context), residual
        return self.part(x, context), residual

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        delta, residual, angles, context = args
        x, residual = self.norm.add_norm(delta, residual)
        if isinstance(self.part, TokenMixer):
            return self.part.for_rows(x, angles, context, rows), residual[rows.token_rows]
        return self.part(x[rows.token_rows], context.of_rows(rows)), residual[rows.token_rows]


class NemotronH(HybridDecoder):
    """Model class for NemotronHForCausalLM."""

    names = DecoderNames("backbone.embeddings", "backbone.norm_f", "backbone.layers")

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        kinds = read_kinds(config)
        if MOE not in kinds:
            config.passes_over(*EXPERT_KEYS)
        config = _in_common_words(config, len(kinds))
        sizes = Sizes.read(config, head_dim=128)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.shape = read_shape(config)
        # A rope of no dimensions: layers are given angles and ignore them.
        nothing = RopeParams("default", theta=1.0, rotary_dim=0, original_len=sizes.max_positions)
        self.rotaries = [self.make_rotary(nothing, max_len)]
        self.attention_layers = [self.attention_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        layers = [self.layer(index, kind) for index, kind in enumerate(kinds)]
        self.layers = layers
        self.recurrent_layers = {own.part.index: own.part.mixer for own in layers if isinstance(own.part, Mamba2)}

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. Names begin with `backbone` in files and with `model` in transformers'
        modules."""
        return super().slot_name(f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name)

    def layer(self, index: int, kind: str) -> NemotronHLayer:
        hidden_size, dtype, device = self.sizes.hidden_size, self.dtype, self.device
        match kind:
            case "linear_attention":
                part: TokenMixer | FeedForward = Mamba2(index, hidden_size, self.shape, self.sizes.eps, dtype=dtype,
                                                        device=device)
            case "full_attention":
                bias = self.config.get("attention_bias", bool, False)
                part = UnplacedAttention(self.attention_layer(index), hidden_size, qkv_bias=bias, out_bias=bias,
                                         head_norm=None, dtype=dtype, device=device)
            case "mlp":
                part = self._mlp(self.config.required("intermediate_size", int))
            case _:
                part = self._experts(index)
        return NemotronHLayer(self.make_norm(), part)

    def _mlp(self, width: int) -> PlainMLP:
        bias = self.config.get("mlp_bias", bool, False)
        return PlainMLP(self.sizes.hidden_size, width, bias=bias, dtype=self.dtype, device=self.device)

    def _experts(self, index: int) -> MoE:
        config, hidden_size, dtype, device = self.config, self.sizes.hidden_size, self.dtype, self.device
        rule = read_rule(config)
        width = config.required("moe_intermediate_size", int)
        latent_size, latent = config.optional("moe_latent_size", int), None
        if latent_size is not None:
            bias = config.get("mlp_bias", bool, False)
            latent = (Linear(hidden_size, latent_size, bias=bias, dtype=dtype, device=device),
                      Linear(latent_size, hidden_size, bias=bias, dtype=dtype, device=device))
        has_shared = config.must_equal("n_shared_experts", 0, 1, default=1)
        return MoE(
            Router(index, hidden_size, rule, has_bias=True, dtype=dtype, device=device),
            Experts(rule.num_experts, latent_size or hidden_size, width, activation=ACTIVATION, dtype=dtype,
                    device=device),
            shared=self._mlp(config.required("moe_shared_expert_intermediate_size", int)) if has_shared else None,
            latent=latent,
        )


def read_kinds(config: ConfigReader) -> list[str]:
    """Read the kind of each layer: `layers_block_type`, or the letters of `hybrid_override_pattern`."""
    kinds = kinds_under(config, "layers_block_type", "hybrid_override_pattern")
    if not kinds:
        raise config.refusal("hybrid_override_pattern", "hybrid_override_pattern or layers_block_type must give the "
                                                        "kind of each layer")
    if config.get("num_hidden_layers", int, len(kinds)) != len(kinds):
        raise config.refusal("num_hidden_layers", f"hybrid_override_pattern or layers_block_type gives {len(kinds)} "
                                                  "layers")
    return kinds


def kinds_under(config: ConfigReader, list_key: str, pattern_key: str) -> list[str]:
    names = config.optional(list_key, list[str])
    key, given = (list_key, names) if names is not None else (pattern_key, list(config.get(pattern_key, str, "")))
    kinds = [OLD_NAMES.get(name, LETTERS.get(name, name)) for name in given]
    if set(kinds) - set(LETTERS.values()):
        raise config.refusal(key, f"supported layer kinds: {', '.join(LETTERS.values())} (in a pattern: "
                                  f"{' '.join(LETTERS)})")
    return kinds


def _in_common_words(config: ConfigReader, num_layers: int) -> ConfigReader:
    refuse_unsupported(config, ACTIVATION, "mlp_hidden_act")
    config.must_equal("mamba_hidden_act", "silu", default="silu")
    config.must_equal("residual_in_fp32", False, default=False)
    config.must_equal("sliding_window", None)
    # Nothing rotates; norms have layer_norm_epsilon; the inner size is that of all heads, and use_bias decides for both
    # projections.
    config.passes_over("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "rms_norm_eps",
                       "norm_eps", "expand", "mamba_proj_bias")
    older_head_dim = config.optional("attention_head_dim", int)
    values = {
        "num_hidden_layers": num_layers,
        "rms_norm_eps": config.get("layer_norm_epsilon", float, 1e-5),
        "intermediate_size": config.get("intermediate_size", int, 0),
        "head_dim": config.optional("head_dim", int) or older_head_dim,
    }
    return config.with_values(values)


def read_shape(config: ConfigReader) -> Mamba2Shape:
    """Read the shape of the Mamba-2 layers. Only `time_step_limit` limits time steps (dt). `time_step_min` and similar
    keys are for initialisation; a limit that applied to prefill only would make text depend on how a prompt is
    split."""
    num_heads = config.required("mamba_num_heads", int)
    num_groups = config.get("n_groups", int, 8)
    if num_groups < 1 or num_heads % num_groups:
        raise config.refusal("n_groups", f"it must divide mamba_num_heads ({num_heads})")
    return Mamba2Shape(
        num_heads=num_heads,
        head_dim=config.required("mamba_head_dim", int),
        num_groups=num_groups,
        state_size=config.required("ssm_state_size", int),
        conv_width=config.get("conv_kernel", int, 4, least=1),
        conv_bias=config.get("use_conv_bias", bool, True),
        proj_bias=config.get("use_bias", bool, False),
        norm_groups=num_groups,
        dt_limits=read_limits(config, "time_step_limit"),
    )


def read_rule(config: ConfigReader, scale: float = 1.0) -> moe.RouteRule:
    """Read how the router chooses experts. scale: the default factor by which the sum of a token's experts is
    multiplied."""
    num_experts = config.required("n_routed_experts", int)
    top_k = config.required("num_experts_per_tok", int)
    num_groups, top_groups = config.get("n_group", int, 1), config.get("topk_group", int, 1)
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise config.refusal("n_group", f"it must divide the number of experts ({num_experts}), and topk_group "
                                        f"({top_groups}) must be from 1 to n_group")
    if num_groups > 1 and num_experts < 2 * num_groups:
        raise config.refusal("n_group", "groups are ranked by their two best experts, so each must have at least two "
                                        f"of the {num_experts} experts")
    if not 1 <= top_k <= top_groups * (num_experts // num_groups):
        raise config.refusal("num_experts_per_tok", f"it must be from 1 to {top_groups * (num_experts // num_groups)}, "
                                                    "the experts of the chosen groups")
    return moe.RouteRule(
        num_experts,
        top_k,
        scoring="sigmoid",
        renormalise=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float, scale),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="top2",
    )
