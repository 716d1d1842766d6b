"""BlockHead: DFlash and DSpark drafters, which predict a whole block of tokens in one pass.

The target's tokens are the head's context. The keys and values of every layer are computed from several of the target's
residual streams, joined and normed; the head never runs over those tokens itself. A block is the last known token
followed by mask tokens. One pass over the block predicts all drafts.

    position          0 .. p-1                  p             p+1 .. p+n
    keys and values   context of the target     last known    masks
    rows that run                               yes           yes

DSpark adds a Markov head, which lets a draft depend on the draft before it, and a confidence head, which estimates
whether a draft will be accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels import ops
from outrider.layers import Angles, Linear, Module, RMSNorm, Rotary, StepContext, rotate
from outrider.mixers import AttentionLayer, PagedLayer
from outrider.models.base import Hidden, Model
from outrider.models.block_config import BlockConfig, Sight, read_block_config
from outrider.models.config import ConfigError, ConfigReader, read_rope
from outrider.models.file_head import FileHead
from outrider.models.llama import LlamaLayer
from outrider.models.markov import MarkovHead


def build_block(config: ConfigReader, target: Model, *, first_layer: int, max_drafts: int, max_len: int,
                dtype: torch.dtype, device: torch.device) -> BlockHead:
    """Build a head without its weights. Its layers are numbered from `first_layer` on, after the target's."""
    head = BlockHead(read_block_config(config, target.num_layers), target, first_layer=first_layer,
                     max_drafts=max_drafts, max_len=max_len, dtype=dtype, device=device)
    config.refuse_unread()
    return head


class BlockHead(FileHead):
    renamed = ((r"^model\.", ""),)
    unused = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # of the target, and the inverse of d2t

    def __init__(self, config: BlockConfig, target: Model, *, first_layer: int, max_drafts: int, max_len: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        sizes = config.sizes
        super().__init__(config.top.source, config.layer, sizes, target, dtype=dtype, device=device)
        self.config, self.aux_layers, self.made_for = config, config.aux_layers, config.made_for
        wide = self.read_target_size(config.top, config.layer)
        self.read_vocabulary(config.top)
        # Rows of the largest block; the row of the last known token may make no draft.
        self.first_row = 0 if config.samples_from_anchor else 1
        most_rows = max_drafts + self.first_row
        self.rotary = Rotary(read_rope(config.layer, sizes.head_dim), max_len=max_len, dtype=dtype, device=device)
        self.attention_layers = [
            AttentionLayer(first_layer + index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim,
                           scale=sizes.head_dim**-0.5, window=_cache_window(config, sight, most_rows))
            for index, sight in enumerate(config.sights)
        ]
        layers = [self._layer(layer) for layer in self.attention_layers]
        self.layers = layers
        self.attentions = [layer.attention for layer in layers]  # also where fused layers have replaced `layers`
        self.fc = Linear(len(self.aux_layers) * wide, self.hidden_size, bias=False, dtype=dtype, device=device)
        self.hidden_norm, self.norm = (RMSNorm(self.hidden_size, sizes.eps, dtype=dtype, device=device)
                                       for _ in range(2))
        self.markov: MarkovHead | None = None
        if config.markov is not None:
            self.markov = MarkovHead(config.markov, vocab_size=target.vocab_size, num_outputs=self.num_outputs,
                                     hidden_size=self.hidden_size, dtype=dtype, device=device)
        self.confidence: Linear | None = None
        if config.has_confidence:
            rank = config.markov.rank if config.confidence_reads_markov and config.markov is not None else 0
            self.confidence = Linear(self.hidden_size + rank, 1, bias=True, dtype=dtype, device=device)

    @property
    def sights(self) -> tuple[Sight, ...]:
        return self.config.sights

    def _layer(self, layer: AttentionLayer) -> LlamaLayer:
        bias = self.config.layer.get("attention_bias", bool, False)
        return LlamaLayer(layer, self.sizes, qkv_bias=bias, out_bias=bias, mlp_bias=False, has_head_norm=True,
                          dtype=self.dtype, device=self.device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        optional = {"markov_head": self.markov, "confidence_head.proj": self.confidence, "lm_head": self.own_output}
        return [
            ("fc", self.fc),
            ("hidden_norm", self.hidden_norm),
            ("norm", self.norm),
            *((f"layers.{index}", layer) for index, layer in enumerate(self.layers)),
            *((name, part) for name, part in optional.items() if part is not None),
        ]

    # Context

    def context_states(self, hidden: Hidden) -> torch.Tensor:
        """Return the states from which the drafter makes keys and values, [tokens, hidden]: the target's auxiliary
        states, projected and normed."""
        return self.hidden_norm(self.fc(torch.cat(hidden.aux_states, dim=-1), hidden.context))

    def write_context(self, states: torch.Tensor, context: StepContext) -> None:
        """Write the keys and values of all layers for `states`, the result of `context_states`."""
        angles = self.rotary.at(context.rope_positions)
        for attention in self.attentions:
            layer, paged = attention.layer, context.attend.mixer(attention.layer.index)
            kv = attention.qkv.part(states, layer.num_heads * layer.head_dim, attention.qkv.out_features, context)
            self._write(paged, kv, angles)

    def _write(self, paged: PagedLayer, kv: torch.Tensor, angles: Angles) -> None:
        """Write one layer's keys and values. kv: [tokens, k | v], before the norm and rope of k."""
        layer = paged.layer
        norms = self.attentions[layer.index - self.attention_layers[0].index].norms
        if paged.backend.serves_rows:
            return paged.write_fused(kv, angles, norms)
        assert norms is not None
        k, v = kv.unflatten(1, (2, layer.num_kv_heads, layer.head_dim)).unbind(1)
        normed = ops.rms_norm(k.reshape(-1, layer.head_dim), norms.k, norms.eps).view(k.shape)
        paged.write(rotate(normed, angles), v)

    # Block

    def forward(self, tokens: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Run the head on blocks. tokens: [rows], each block's last known token and its mask tokens. Return [rows,
        hidden], the input of `logits`."""
        angles = self.rotary.at(context.rope_positions)
        delta, residual = None, self.embedding.look_up(tokens)
        for layer in self.layers:
            delta, residual = layer(delta, residual, angles, context)
        return self.norm.add_norm(delta, residual)[0]

    def confidence_of(self, hidden: torch.Tensor, before: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return [requests]: the probability that a draft is accepted, given that all drafts before it are. hidden
        [requests, hidden]: the output row that made the draft. before [requests]: the token before the draft."""
        assert self.confidence is not None
        x = hidden
        if self.config.confidence_reads_markov and self.markov is not None:
            x = torch.cat((x, self.markov.before.look_up(before)), dim=-1)
        return torch.sigmoid(self.confidence.wide(x, context)[:, 0])


def _cache_window(config: BlockConfig, sight: Sight, most_rows: int) -> int | None:
    """Return a layer's cache window in tokens. If rows see their whole block, all of them attend from the block's last
    position. The window is then longer by the rest of the block, so that the first row keeps its full window."""
    if sight.window is None or sight.is_causal:
        return sight.window
    if sight.window < most_rows:
        raise ConfigError(f"{config.top.source}: the window has {sight.window} tokens, and a block of {most_rows} rows "
                          "must fit into it: lower num_speculative_tokens")
    return sight.window + most_rows - 1
