"""The loss of a drafter on texts, and its acceptance there, for every training method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.buffers import send
from outrider.training.distillation import distillation_loss
from outrider.training.teacher import TaughtTexts
from outrider.training.trainee import Trainee


def text_loss(trainee: Trainee, taught: TaughtTexts, is_known: torch.Tensor, pass_weights: Sequence[float],
              num_texts: int) -> torch.Tensor:
    """The share of a training step's loss that one micro-batch adds. num_texts: the number of texts in the whole step.

    The loss of a pass is the cross-entropy of the drafter's distribution against the target's, both over the draft
    vocabulary, at places where the target's likeliest token is in that vocabulary (`is_known`, on the host). It is
    averaged over each text first and then over texts, so that long answers do not outweigh short ones."""
    width, device = taught.tokens.shape[1], taught.tokens.device
    chosen, places, row_weights = [], [], []
    for index in range(trainee.num_passes):
        drafted = taught.best.roll(-index, dims=1)  # what the target says after the drafts before this one
        rows = (taught.may_draft(index + 1) & is_known[drafted]).flatten().nonzero()[:, 0]
        counts = torch.bincount(rows // width, minlength=len(taught.lengths))
        chosen.append(send(rows, device))
        places.append(send(taught.place_of.flatten()[rows + index], device))
        row_weights.append(send(pass_weights[index] / (counts[rows // width] * num_texts), device))
    total = torch.zeros((), device=device)
    for index, (states, weight) in enumerate(trainee.outputs(taught, chosen)):
        total = total + distillation_loss(states, weight, taught.logits, places[index], row_weights[index])
    return total


def pass_weights(num_passes: int, decay: float) -> list[float]:
    """The weights of the draft passes in the loss. Each is `decay` times the one before, and they add up to 1."""
    raw = [decay**index for index in range(num_passes)]
    return [weight / sum(raw) for weight in raw]


@dataclass(frozen=True)
class HeldOutAcceptance:
    """The number of drafts that the target would accept, counted at every position of held-out greedy answers, which
    are not trained on."""

    num_places: int
    num_accepted: tuple[int, ...]  # by position: places where this draft and all before it are the target's tokens

    def __add__(self, other: HeldOutAcceptance) -> HeldOutAcceptance:
        counts = zip(self.num_accepted, other.num_accepted, strict=True)
        return HeldOutAcceptance(self.num_places + other.num_places, tuple(one + two for one, two in counts))

    @property
    def by_position(self) -> list[float]:
        return [count / max(1, self.num_places) for count in self.num_accepted]

    @property
    def mean_run(self) -> float:
        """The mean number of tokens that a step would yield, over all places at which it may begin."""
        return 1 + sum(self.by_position)


@torch.no_grad()
def held_out_acceptance(trainee: Trainee, taught: TaughtTexts, ids: torch.Tensor) -> HeldOutAcceptance:
    """Count the drafts that the target would accept on held-out texts. ids: the target's ids of the drafter's tokens.
    In a greedy text the true tokens are the target's likeliest ones, so as long as drafts are right, the drafter gets
    the inputs that it would get in serving."""
    device = taught.tokens.device
    rows = send(taught.may_draft(trainee.num_passes).flatten().nonzero()[:, 0], device)
    is_right = torch.ones_like(rows, dtype=torch.bool)
    best, counts = send(taught.best.flatten(), device), []
    for index, logits in enumerate(trainee.logits(taught, [rows] * trainee.num_passes)):
        is_right = is_right & (ids[logits.argmax(dim=-1)] == best[rows + index])
        counts.append(int(is_right.sum()))
    counts += [0] * (trainee.num_passes - len(counts))  # of texts that are too short for so many drafts
    return HeldOutAcceptance(len(rows), tuple(counts))
