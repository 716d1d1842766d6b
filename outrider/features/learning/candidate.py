"""Candidate: a copy of the serving draft head that is trained on served texts, and compared with the serving head.

The loss is the cross-entropy against the served tokens. For any parameters of the requests, these tokens are samples of
the distribution against which drafts are checked. The output layer is not trained, so that memory and time are spent on
the head's layer only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.features.learning.served_head import ServedHead
from outrider.features.learning.traffic import ServedText
from outrider.kernels.vendor_products import wide_product
from outrider.trainable.eagle3_network import Eagle3Network, TextSlots

MOST_PASSES = 4  # drafts after one known token that are trained and measured
PASS_DECAY = 0.8  # weight of a pass against the one before it
MOST_PLACES = 256  # places of a micro-batch that a pass learns from: logits over a vocabulary are most of the work
CLIP = 1.0


@dataclass(frozen=True)
class PaddedTexts:
    """A micro-batch of served texts, padded to the longest."""

    tokens: torch.Tensor  # [texts, length] int64
    aux_states: torch.Tensor  # [texts, length, layers, hidden]
    lengths: torch.Tensor  # [texts]
    answer_from: torch.Tensor  # [texts]

    @classmethod
    def join(cls, texts: Sequence[ServedText]) -> PaddedTexts:
        device, length = texts[0].tokens.device, max(len(text.tokens) for text in texts)
        tokens = texts[0].tokens.new_zeros(len(texts), length)
        aux_states = texts[0].aux_states.new_zeros(len(texts), length, *texts[0].aux_states.shape[1:])
        for index, text in enumerate(texts):
            tokens[index, : len(text.tokens)] = text.tokens
            aux_states[index, : len(text.tokens)] = text.aux_states
        return cls(tokens, aux_states, torch.tensor([len(text.tokens) for text in texts], device=device),
                   torch.tensor([text.answer_from for text in texts], device=device))

    def places(self, num_drafts: int) -> torch.Tensor:
        """Return [places]: the tokens after which drafts are trained and measured, as indexes (text * length +
        position): those whose next `num_drafts` tokens are known and were produced by the target. The first token is
        never one of them, because there is no hidden state before it."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_place = (at >= (self.answer_from[:, None] - 1).clamp_min(1)) & (at + num_drafts < self.lengths[:, None])
        return is_place.flatten().nonzero()[:, 0]


class Candidate:
    """The weights in training: float32 copies of the serving weights, with their optimizer."""

    def __init__(self, served: ServedHead, rate: float) -> None:
        self._served = served
        self.num_passes = min(served.max_drafts, MOST_PASSES)
        self.weights = {name: slot.target.detach().float().clone().requires_grad_()
                        for name, slot in served.slots.items()}
        self._network = Eagle3Network(served.form, self.weights)
        self._serving = Eagle3Network(served.form, served.weights)
        self._draft_ids = served.draft_ids()
        self._adam = torch.optim.AdamW(list(self.weights.values()), lr=rate, betas=(0.9, 0.95), weight_decay=0.0,
                                       fused=served.device.type == "cuda")  # without memory for sums
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self._adam.step()  # makes the moments, so that all memory is taken now; without gradients it changes nothing
        self.restart()
        self._draw = torch.Generator(device=served.device).manual_seed(0)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the training from the weights that are served now."""
        for name, weight in self.weights.items():
            weight.copy_(self._served.slots[name].target)
            assert weight.grad is not None
            weight.grad.zero_()
        for state in self._adam.state.values():
            for value in state.values():
                value.zero_()

    @torch.enable_grad()
    def add_gradients(self, texts: Sequence[ServedText], share: float) -> None:
        """Add the gradients of a micro-batch's loss, multiplied by `share`, the micro-batch's share of the whole
        training step."""
        padded = PaddedTexts.join(texts)
        with self._arithmetic():
            loss = self._loss(padded) * share
            if loss.requires_grad:  # else no place of these texts can be learned from
                loss.backward()

    def _loss(self, padded: PaddedTexts) -> torch.Tensor:
        tokens, total = padded.tokens.flatten(), torch.zeros((), device=padded.tokens.device)
        chosen = []
        for index in range(self.num_passes):
            places = padded.places(index + 1)
            places = places[self._draft_ids[tokens[places + 1 + index]] >= 0]
            order = torch.randperm(len(places), generator=self._draw, device=places.device)
            chosen.append(places[order[:MOST_PLACES]])
        decay = sum(PASS_DECAY**index for index in range(self.num_passes))
        for index, logits in enumerate(self._logits(self._network, padded, chosen)):
            if len(chosen[index]):
                wanted = self._draft_ids[tokens[chosen[index] + 1 + index]]
                total = total + PASS_DECAY**index / decay * F.cross_entropy(logits.float(), wanted)
        return total

    def apply(self) -> None:
        """Update the weights by their gradients. If a gradient is not finite, RuntimeError is raised and the weights
        stay unchanged."""
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.weights.values()), CLIP))
        if math.isfinite(norm):
            self._adam.step()
        self._adam.zero_grad(set_to_none=False)  # the memory stays
        if not math.isfinite(norm):
            raise RuntimeError("the gradients are not finite: this training step of the drafter is dropped")

    def measure(self, texts: Sequence[ServedText], *, is_serving: bool) -> tuple[int, int]:
        """Draft greedily after every place of the texts, with the weights in training or with the serving ones. Returns
        (number of places, number of accepted drafts)."""
        padded = PaddedTexts.join(texts)
        tokens, rows = padded.tokens.flatten(), padded.places(self.num_passes)
        is_right, num_accepted = torch.ones_like(rows, dtype=torch.bool), 0
        network = self._serving if is_serving else self._network
        with torch.no_grad(), self._arithmetic():
            for index, logits in enumerate(self._logits(network, padded, [rows] * self.num_passes)):
                is_right = is_right & (logits.argmax(dim=-1) == self._draft_ids[tokens[rows + 1 + index]])
                num_accepted += int(is_right.sum())
        return len(rows), num_accepted

    def _logits(self, network: Eagle3Network, padded: PaddedTexts,
                rows: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the logits [rows, draft vocabulary] of each draft pass. `rows`: for each pass, the tokens after which
        logits are wanted, as indexes into the flattened texts."""
        slots = TextSlots.from_lengths(padded.lengths, padded.tokens.shape[1])
        with torch.no_grad():
            embeds, output = self._served.embeds(padded.tokens), self._served.output
            output = output if padded.aux_states.is_cuda else output.float()
        passes = network.passes(embeds, padded.aux_states.float(), slots, self.num_passes)
        for own, states in zip(rows, passes, strict=False):  # texts of one token have no passes
            chosen = states.index_select(0, slots.rows_of(own))
            yield F.linear(chosen, output) if torch.is_grad_enabled() else _wide_logits(chosen, output)

    def _arithmetic(self) -> AbstractContextManager[object]:
        """A context that computes products in bfloat16 on a GPU. Weights stay float32."""
        is_on_gpu = self._served.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if is_on_gpu else nullcontext()


def _wide_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits of the states x for a measurement, in float32: in 16 bits several tokens may have equal logits, which
    would count as wrong drafts."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(weight.dtype)
        is_narrow = x.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
        return wide_product(x, weight) if is_narrow else F.linear(x, weight)
