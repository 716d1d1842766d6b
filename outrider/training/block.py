"""BlockTrainee: a block drafter in training, a DFlash one or, with a Markov head, a DSpark one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from outrider.models.base import Model
from outrider.training.block_network import BlockNetwork, weight_shapes
from outrider.training.block_sizes import BlockSizes, block_aux_layers
from outrider.training.eagle3 import OUTPUT, begin_weights
from outrider.training.export import write_drafter
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import TaughtTexts
from outrider.training.trainee import DrafterCard, PassOutput, Trainee
from outrider.training.vocabulary import DraftVocabulary


class BlockTrainee(Trainee):
    """A block drafter in training. Its final norm and output rows begin as the target's, all other weights are
    random."""

    def __init__(self, target: Model, settings: TrainingSettings, vocabulary: DraftVocabulary) -> None:
        self._target, self._vocabulary = target, vocabulary
        self.num_passes = settings.passes
        self.sizes = BlockSizes.for_target(target, settings, _mask_token(vocabulary))
        fresh = begin_weights(weight_shapes(self.sizes, len(vocabulary.ids)), target, vocabulary, settings.seed)
        if self.sizes.markov_rank:  # drafts do not depend on each other at first
            fresh["markov_head.markov_w2.weight"].zero_()
        self._frozen = {OUTPUT: fresh.pop(OUTPUT)} if settings.freeze_output else {}
        self.weights = {name: weight.requires_grad_() for name, weight in fresh.items()}
        self.network = BlockNetwork(self.sizes, self.weights)

    @classmethod
    def aux_layers_for(cls, target: Model, settings: TrainingSettings) -> tuple[int, ...]:
        return block_aux_layers(target, settings)

    def outputs(self, taught: TaughtTexts, rows: list[torch.Tensor]) -> Iterator[PassOutput]:
        """Compute one block at every position that some draft pass asks for. Pass s reads row s of the blocks'
        drafts."""
        anchors, place = block_places(rows, *taught.tokens.shape)
        if not anchors.shape[1]:
            return
        states = self.network.states(self.block_embeds(taught, anchors), anchors, taught.aux_states)
        flat, tokens = states[:, :, self.sizes.first_row :].flatten(0, 1), taught.tokens.flatten()
        output = self._frozen.get(OUTPUT, self.weights.get(OUTPUT))
        assert output is not None
        for index, own_rows in enumerate(rows):
            own = flat[:, index].index_select(0, place[own_rows])
            if self.sizes.markov_rank:  # after the true token, which is the draft before if that is right
                own, weight = self.network.with_markov_head(own, tokens[own_rows + index], output)
                yield PassOutput(own, weight)
            else:
                yield PassOutput(own, output)

    def block_embeds(self, taught: TaughtTexts, anchors: torch.Tensor) -> torch.Tensor:
        """Return [texts, blocks, rows, hidden]: the input embeddings of blocks. The first row of a block is the last
        known token; all other rows are mask tokens."""
        ids = anchors.new_full((*anchors.shape, self.sizes.num_rows), self.sizes.mask_token)
        ids[..., 0] = taught.tokens.gather(1, anchors)
        embeds = self._target.embed_tokens.look_up(ids.flatten()).detach()
        return embeds.view(*ids.shape, -1)

    def export(self, folder: Path, card: DrafterCard, file_form: str) -> None:
        tensors = {name: weight.detach() for name, weight in (self.weights | self._frozen).items()}
        size = len(self._vocabulary.ids)
        is_speculators = file_form == "speculators"
        config = (self.sizes.speculators_config(size, card.target_name) if is_speculators
                  else self.sizes.hf_config(size))
        write_drafter(folder, config, tensors, self._vocabulary, "block", self.num_passes, card)


def block_places(rows: list[torch.Tensor], num_texts: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions where blocks begin, [texts, most blocks of a text]; texts with fewer blocks repeat one. Also
    return the block of each place, as text * most blocks + block. rows: for each pass text * width + position."""
    wanted = torch.zeros(num_texts, width, dtype=torch.bool, device=rows[0].device)
    for own in rows:
        wanted.view(-1)[own] = True
    counts = wanted.sum(dim=1)
    most = int(counts.max())
    order = torch.argsort(~wanted, dim=1, stable=True)[:, :most]  # wanted positions first, in their order
    anchors = torch.where(torch.arange(most, device=order.device) < counts[:, None], order, order[:, :1])
    place = wanted.cumsum(dim=1) - 1 + torch.arange(num_texts, device=order.device)[:, None] * most
    return anchors, place.flatten()


def _mask_token(vocabulary: DraftVocabulary) -> int:
    """Return the token that stands for masked ones: the highest id that is never drafted, or the highest id of all if
    every token can be drafted."""
    unknown = (~vocabulary.is_known).nonzero()
    return int(unknown[-1]) if len(unknown) else vocabulary.target_size - 1
