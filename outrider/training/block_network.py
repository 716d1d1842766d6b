"""The forward pass of a block drafter for training: the computation of `models.block`, in torch operations with
gradients.

Blocks begin at many places of a text at once. A block at token p contains the token itself and masks at p + 1, p + 2,
... Its rows attend to each other and to the context before p, which is made of the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.trainable.named_layers import NamedLayers, rotate, wide
from outrider.training.block_sizes import BlockSizes


class BlockNetwork(NamedLayers):
    """A block drafter's passes over texts. Weights are float32 and named as in the exported file."""

    def __init__(self, sizes: BlockSizes, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(weights, sizes.eps)
        self._sizes = sizes

    def states(self, embeds: torch.Tensor, anchors: torch.Tensor, aux_states: torch.Tensor) -> torch.Tensor:
        """Inputs of the output layer [texts, blocks, rows, hidden]. embeds: [texts, blocks, rows, hidden] of the last
        known tokens and of masks; anchors: [texts, blocks] positions of the last known tokens; aux_states: [texts,
        length, layers, hidden]."""
        rows = embeds.shape[2]
        dtype = self._weights["fc.weight"].dtype  # a target's states may be narrower or wider
        context = self._norm("hidden_norm", self._linear("fc", aux_states.flatten(2).to(dtype)))
        places = anchors[..., None] + torch.arange(rows, device=anchors.device)  # [texts, blocks, rows]
        context_places = torch.arange(aux_states.shape[1], device=anchors.device)
        before = context_places < anchors[..., None]  # [texts, blocks, length]
        x = embeds.to(dtype)
        for index in range(self._sizes.num_layers):
            prefix = f"layers.{index}"
            mixed = self._attend(prefix, self._norm(f"{prefix}.input_layernorm", x), context, places, before)
            x = x + self._linear(f"{prefix}.self_attn.o_proj", mixed)
            x = x + self._mlp(prefix, self._norm(f"{prefix}.post_attention_layernorm", x))
        return self._norm("norm", x)

    def with_markov_head(self, states: torch.Tensor, tokens: torch.Tensor,
                         output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states and output rows with extra columns, so that their product includes the Markov head's
        term."""
        before = self._weights["markov_head.markov_w1.weight"][tokens]
        after = self._weights["markov_head.markov_w2.weight"]
        return torch.cat((states, before), dim=-1), torch.cat((output, after), dim=-1)

    def _attend(self, prefix: str, x: torch.Tensor, context: torch.Tensor, places: torch.Tensor,
                before: torch.Tensor) -> torch.Tensor:
        """Returns [texts, blocks, rows, heads * dim]. Scores of the context and of the block's own rows share a
        softmax."""
        texts, blocks, rows, _ = x.shape
        positions, theta = torch.arange(context.shape[1], device=x.device), self._sizes.rope_theta
        query = rotate(self._heads(prefix, "q", x), places[..., None, None], theta)  # [texts, blocks, rows, heads, dim]
        own_key = rotate(self._heads(prefix, "k", x), places[..., None, None], theta)
        own_value = self._heads(prefix, "v", x)
        key = rotate(self._heads(prefix, "k", context), positions[:, None, None], theta)  # [texts, length, ..]
        value = self._heads(prefix, "v", context)
        grouped = query.unflatten(3, (self._sizes.num_kv_heads, -1))  # [texts, blocks, rows, kv heads, group, dim]
        seen = torch.einsum("tbrkgd,tlkd->tkgbrl", grouped, key)
        seen = wide(seen).masked_fill(~before[:, None, None, :, None], float("-inf"))
        own = wide(torch.einsum("tbrkgd,tbskd->tkgbrs", grouped, own_key))
        shares = (torch.cat((seen, own), dim=-1) * self._sizes.head_dim**-0.5).softmax(dim=-1)
        from_context, from_block = shares.to(value.dtype).split([context.shape[1], rows], dim=-1)
        mixed = torch.einsum("tkgbrl,tlkd->tbrkgd", from_context, value)
        mixed = mixed + torch.einsum("tkgbrs,tbskd->tbrkgd", from_block, own_value)
        return mixed.reshape(texts, blocks, rows, -1)

    def _heads(self, prefix: str, name: str, x: torch.Tensor) -> torch.Tensor:
        """Split features into heads [.., heads, dim], and norm the heads of q and k."""
        heads = self._linear(f"{prefix}.self_attn.{name}_proj", x).unflatten(-1, (-1, self._sizes.head_dim))
        return heads if name == "v" else self._norm(f"{prefix}.self_attn.{name}_norm", heads)


def weight_shapes(sizes: BlockSizes, draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of the exported file, by name."""
    hidden, width = sizes.hidden_size, sizes.intermediate_size
    queries, others = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(sizes.aux_layers) * hidden),
                                          "hidden_norm.weight": (hidden,)}
    for index in range(sizes.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (others, hidden),
            "self_attn.v_proj": (others, hidden), "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (sizes.head_dim,), "self_attn.k_norm": (sizes.head_dim,),
            "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width),
        }
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (draft_vocab_size, hidden)}
    if sizes.markov_rank:
        shapes |= {"markov_head.markov_w1.weight": (sizes.vocab_size, sizes.markov_rank),
                   "markov_head.markov_w2.weight": (draft_vocab_size, sizes.markov_rank)}
    return shapes
