"""ServedHead: the EAGLE-3 head that an engine drafts with, as its trainer sees it.

It gives the trainer the head's shape and weights, under the names of the network in training. It replaces the serving
weights by better ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Drafter
from outrider.drafters.combined import CombinedDrafter
from outrider.formats import DenseLinear, WeightSlot
from outrider.kernels.cpu.products import fits_bfloat16
from outrider.layers.fuse import prepare
from outrider.models.eagle import Eagle3Head
from outrider.trainable.eagle3_network import LAYER, HeadForm
from outrider.trainable.named_layers import wide

ADVICE = "start without adapt_drafter, or use an EAGLE-3 head that `outrider train-drafter` has trained"


class ServedHead:
    def __init__(self, head: Eagle3Head, max_drafts: int, allow_copies: bool) -> None:
        """allow_copies: weights may have second copies in other layouts, which `take` must make again. Raises
        ValueError for a head that the network in training cannot represent."""
        self.head, self.max_drafts, self._allow_copies = head, max_drafts, allow_copies
        self.slots = {name.replace("layers.0.", f"{LAYER}."): slot for name, slot in head.weights().items()}
        reason = self._lack()
        if reason is not None:
            raise ValueError(f"adapt_drafter: {reason}: {ADVICE}")
        # Products on a CPU read half as much where weights are numbers of bfloat16: those that are stay so.
        may_round = head.device.type == "cpu" and head.dtype is torch.float32
        self._is_rounded = {name: may_round and fits_bfloat16(slot.target) for name, slot in self.slots.items()}
        table = head.rotary.table[1:]  # slot p turns by the angles of p - 1
        self.form = HeadForm(
            head.sizes.head_dim, head.sizes.eps,
            lambda x, positions: rotate_by_table(x, positions, table), norms_aux=bool(head.aux_norms),
            feeds_back_normed=head.feeds_back_normed, norm_before_residual=head.norm_before_residual,
        )

    @classmethod
    def from_drafter(cls, drafter: Drafter | None, allow_copies: bool) -> ServedHead:
        """Find the EAGLE-3 head among the engine's drafters. Raises ValueError if no drafter has a head that can be
        trained."""
        parts = drafter.drafters if isinstance(drafter, CombinedDrafter) else [] if drafter is None else [drafter]
        for part in parts:
            if isinstance(part, AutoregressiveDrafter) and isinstance(part.network, Eagle3Head):
                return cls(part.network, part.max_drafts, allow_copies)
        names = ", ".join(part.name for part in parts) or "none on the device"
        raise ValueError(f"adapt_drafter: only EAGLE-3 heads learn while they serve, and the drafter is {names}: "
                         f"{ADVICE}")

    def _lack(self) -> str | None:
        """The reason why the head cannot be trained; None if it can."""
        head, slots = self.head, self.slots.values()
        if head.target.group is not None:
            return "a head that several ranks hold does not learn while it serves (tensor_parallel_size)"
        if len(head.attention_layers) != 1 or head.attention_layers[0].window is not None:
            return "the head has several layers, or a window"
        if head.has_head_norm or any(name.endswith(".bias") for name in self.slots):
            return "the head's layer has norms of q and k, or biases"
        if head.input_norm is not None:
            return "the head has a norm over all auxiliary states together (norm_before_fc)"
        if head.first.mlp.activation != "silu" or head.rotary.table.shape[1] != head.sizes.head_dim:
            return "the head's activation is not silu, or its rope turns a part of each attention head"
        if any(slot.kind is not None or slot.layout is not None for slot in slots):
            return "the head's weights are quantised"
        if self._output_format is None:
            return "the head uses the target's output layer, whose weights are quantised"
        return None

    @property
    def _output_format(self) -> DenseLinear | None:
        linear = self.head.own_output or self.head.target.lm_head
        return linear.format if isinstance(linear.format, DenseLinear) else None

    @property
    def output(self) -> torch.Tensor:
        """Return the weight [draft vocabulary, hidden] of the output layer, which is not trained."""
        assert self._output_format is not None, "checked at the start"
        return self._output_format.dense()

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The serving weights in float32. Each is converted when it is read."""
        return ServingWeights(self.slots)

    def embeds(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [.., hidden] of tokens in float32."""
        found = self.head.embedding.format.look_up(tokens.flatten())
        return found.view(*tokens.shape, -1).float()

    def draft_ids(self) -> torch.Tensor:
        """Return [target vocabulary]: the head's id of each of the target's tokens; -1 for tokens that it cannot
        draft."""
        head = self.head
        if head.target_ids is None:
            return torch.arange(head.num_outputs, device=head.device)
        ids = torch.full((head.target.vocab_size,), -1, dtype=torch.int64, device=head.device)
        return ids.index_copy_(0, head.target_ids, torch.arange(head.num_outputs, device=head.device))

    @torch.inference_mode(False)  # steps run in inference mode, and weights outlive them
    @torch.no_grad()
    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Serve with these weights from the next step on. They are written over the old ones in place, since captured
        steps read these addresses. On a CPU, second copies are made again."""
        for name, slot in self.slots.items():
            slot.target.copy_(weights[name].bfloat16() if self._is_rounded[name] else weights[name])
        if self.head.device.type == "cpu":
            self.head.finalize()
            prepare([self.head], self._allow_copies)


class ServingWeights(Mapping[str, torch.Tensor]):
    """The serving weights as float32, by name. A matrix is converted only when it is read, so that no second copy of
    all weights is held."""

    def __init__(self, slots: Mapping[str, WeightSlot]) -> None:
        self._slots = slots

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._slots[name].target.detach().float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def rotate_by_table(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Apply rope to x [.., count, dim]: rotate its halves by the rows `positions` [count, 1] of a table [positions, cos
    | sin]."""
    cos, sin = table[positions[:, 0]].to(wide(x).dtype).chunk(2, dim=-1)
    one, two = wide(x).chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)
