"""The arithmetic of an EAGLE-3 head for training: what `models.eagle` computes, as torch operations with gradients.

Passes are unrolled as drafting makes them. Pass 0 runs at every token p (slot p of the head's cache) with the target's
hidden state of p - 1. Pass s runs after the drafts before it: with token p + s, which is the true one, and with the
head's own state of pass s - 1. Its query sees the slots of pass 0 up to p, and of the passes after it the one slot on
its own way:

    pass 0   slot 1  2  3 ... p          filled with the target's states
    pass 1                       p+1     token p+1, own state of pass 0 at p
    pass 2                           p+2 token p+2, own state of pass 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from outrider.learning.named_layers import NamedLayers, wide
from outrider.learning.unrolled_attention import attend

LAYER = "midlayer"


@dataclass(frozen=True)
class HeadForm:
    """The sizes and variants of an EAGLE-3 head of one Llama layer that its arithmetic depends on."""

    head_dim: int
    eps: float
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # turns x [.., dim] by positions [.., 1]
    norms_taps: bool  # each tap has a norm of its own (EAGLE 3.1)
    feeds_back_normed: bool  # the state fed to the next pass is the normed one (EAGLE 3.1)
    norm_before_residual: bool = False  # the residual stream begins with the normed state


class Eagle3Network(NamedLayers):
    """A head's passes over padded texts. Weights are named as in the exported file, and float32 where they are
    trained."""

    def __init__(self, form: HeadForm, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(weights, form.eps)
        self._form = form
        self._scale = form.head_dim**-0.5

    def passes(self, embeds: torch.Tensor, taps: torch.Tensor, num_passes: int) -> Iterator[torch.Tensor]:
        """Inputs of the output layer [texts, length - 1 - pass, hidden]; index p - 1 belongs to token p. embeds:
        [texts, length, hidden] embeddings of the tokens; taps: [texts, length, taps, hidden]."""
        embeds = self._norm(f"{LAYER}.input_layernorm", embeds[:, 1:])
        hidden = self._consume(taps[:, :-1], embeds.dtype)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index in range(num_passes):
            count = embeds.shape[1] - index
            if count < 1:
                return
            hidden = hidden[:, :count]
            normed = self._norm(f"{LAYER}.hidden_norm", hidden)
            x = torch.cat((embeds[:, index:], normed), dim=-1)
            positions = torch.arange(index, index + count, device=x.device)[:, None]  # slot p turns by p - 1
            keys.append(self._form.rotate(self._heads("k", x), positions))
            values.append(self._heads("v", x))
            query = self._form.rotate(self._heads("q", x), positions)
            mixed = attend(query, [key[:, :, :count] for key in keys], [value[:, :, :count] for value in values],
                           self._scale)
            stream = normed if self._form.norm_before_residual else hidden
            stream = stream + self._linear(f"{LAYER}.self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
            stream = stream + self._mlp(LAYER, self._norm(f"{LAYER}.post_attention_layernorm", stream))
            output = self._norm("norm", stream)
            yield output
            hidden = output if self._form.feeds_back_normed else stream

    def _consume(self, taps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """dtype: of the weights; a target's states may be narrower or wider."""
        if self._form.norms_taps:
            normed = [self._norm(f"fc_norm.{index}", tap.to(dtype)) for index, tap in enumerate(taps.unbind(dim=2))]
            taps = torch.stack(normed, dim=2)
        return wide(self._linear("fc", taps.flatten(2).to(dtype)))

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        projected = self._linear(f"{LAYER}.self_attn.{name}_proj", x)
        return projected.unflatten(-1, (-1, self._form.head_dim)).transpose(1, 2)
