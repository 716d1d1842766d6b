"""The computation of an EAGLE-3 draft head for training: the same as `models.eagle`, as torch operations with
gradients.

Training runs the same passes as drafting. Pass 0 runs at every token p (slot p of the head's KV cache) with the
target's hidden state of token p - 1. Pass s continues the chain of drafts from pass s - 1: its inputs are the true
token p + s and the head's own hidden state from pass s - 1. Its query sees the slots of pass 0 up to p, and from each
pass between them the one slot that belongs to the same chain.

    pass 0   slot 1  2  3 ... p          filled with the target's states
    pass 1                       p+1     token p+1, own state of pass 0 at p
    pass 2                           p+2 token p+2, own state of pass 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from outrider.kernels.buffers import send
from outrider.trainable.named_layers import NamedLayers, wide
from outrider.trainable.unrolled_attention import attend

LAYER = "midlayer"


@dataclass(frozen=True)
class HeadForm:
    """The sizes and variants of an EAGLE-3 head (one Llama layer) that its forward pass depends on."""

    head_dim: int
    eps: float
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # turns x [.., dim] by positions [.., 1]
    norms_aux: bool  # each auxiliary state has a norm of its own (EAGLE 3.1)
    feeds_back_normed: bool  # the state fed to the next pass is the normed one (EAGLE 3.1)
    norm_before_residual: bool = False  # the residual stream begins with the normed state


@dataclass(frozen=True)
class TextSlots:
    """The cache slots 1, 2, ... of several texts that are padded to one length, listed text by text without the
    padding. All tensors are on one device."""

    num_texts: int
    length: int
    places: torch.Tensor  # [slots] text * length + slot
    positions: torch.Tensor  # [slots] slot - 1

    @classmethod
    def from_lengths(cls, lengths: torch.Tensor, length: int) -> TextSlots:
        """List the slots of texts with lengths [texts], in tokens."""
        at = torch.arange(length, device=lengths.device)
        places = ((at >= 1) & (at < lengths[:, None])).flatten().nonzero()[:, 0]
        return cls(len(lengths), length, places, places % length - 1)

    def to(self, device: torch.device) -> TextSlots:
        """Copy these slots from the host to a device, without waiting for the device."""
        return replace(self, places=send(self.places, device), positions=send(self.positions, device))

    @property
    def _padded(self) -> torch.Tensor:
        """Return [slots]: the index of each slot when texts are padded: text * (length - 1) + slot - 1."""
        return self.places // self.length * (self.length - 1) + self.positions

    def pad(self, heads: torch.Tensor) -> torch.Tensor:
        """Pad [heads, slots, dim] to [texts, heads, length - 1, dim], with zeros in slots that a text does not have."""
        rows = heads.transpose(0, 1)
        padded = rows.new_zeros(self.num_texts * (self.length - 1), *rows.shape[1:]).index_copy(0, self._padded, rows)
        return padded.unflatten(0, (self.num_texts, -1)).transpose(1, 2)

    def take(self, heads: torch.Tensor) -> torch.Tensor:
        """Undo `pad`: [texts, heads, length - 1, dim] -> [slots, heads * dim]."""
        return heads.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self._padded)

    def rows_of(self, places: torch.Tensor) -> torch.Tensor:
        """Return the index, in this list, of the slots at these places (text * length + slot)."""
        rows = places.new_zeros(self.num_texts * self.length)
        rows[self.places] = torch.arange(len(self.places), device=places.device)
        return rows[places]


class Eagle3Network(NamedLayers):
    """The network of an EAGLE-3 head, run over padded texts. Weights have the names of the exported file; trained
    weights are float32."""

    def __init__(self, form: HeadForm, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(weights, form.eps)
        self._form = form
        self._scale = form.head_dim**-0.5

    def passes(self, embeds: torch.Tensor, aux_states: torch.Tensor, slots: TextSlots,
               num_passes: int) -> Iterator[torch.Tensor]:
        """Run the passes, and yield for each pass the inputs of the output layer [slots, hidden]. These are meaningless
        in slots whose text ends before the pass's token. embeds: [texts, length, hidden] embeddings of the tokens;
        aux_states: [texts, length, layers, hidden]. All computations but attention leave out padding."""
        if not len(slots.places):
            return
        embeds = self._norm(f"{LAYER}.input_layernorm", embeds.flatten(0, 1).index_select(0, slots.places))
        hidden = self._consume(aux_states.flatten(0, 1).index_select(0, slots.places - 1), embeds.dtype)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index in range(num_passes):
            normed = self._norm(f"{LAYER}.hidden_norm", hidden)
            x = torch.cat((embeds.roll(-index, dims=0), normed), dim=-1)  # a text's slots lie together, in their order
            positions = slots.positions[:, None] + index  # slot p turns by p - 1
            keys.append(slots.pad(self._form.rotate(self._heads("k", x), positions)))
            values.append(slots.pad(self._heads("v", x)))
            query = slots.pad(self._form.rotate(self._heads("q", x), positions))
            mixed = slots.take(attend(query, keys, values, self._scale))
            stream = normed if self._form.norm_before_residual else hidden
            stream = stream + self._linear(f"{LAYER}.self_attn.o_proj", mixed)
            stream = stream + self._mlp(LAYER, self._norm(f"{LAYER}.post_attention_layernorm", stream))
            output = self._norm("norm", stream)
            yield output
            hidden = output if self._form.feeds_back_normed else stream

    def _consume(self, aux_states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Project the target's auxiliary states [slots, layers, hidden] to the head's width. dtype: the weights'; the
        states may be narrower or wider."""
        if self._form.norms_aux:
            normed = [self._norm(f"fc_norm.{at}", each.to(dtype)) for at, each in enumerate(aux_states.unbind(dim=1))]
            aux_states = torch.stack(normed, dim=1)
        return wide(self._linear("fc", aux_states.flatten(1).to(dtype)))

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Project x, and split the result into heads: [heads, slots, dim]."""
        projected = self._linear(f"{LAYER}.self_attn.{name}_proj", x)
        return projected.unflatten(-1, (-1, self._form.head_dim)).transpose(0, 1)
