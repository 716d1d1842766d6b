"""Eagle3Trainee: an EAGLE-3 head in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from outrider.models.base import Decoder, Model
from outrider.trainable.eagle3_network import LAYER, Eagle3Network, TextSlots
from outrider.training.eagle3_sizes import HeadSizes, read_aux_layers, weight_shapes
from outrider.training.export import write_drafter
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import TaughtTexts
from outrider.training.trainee import DrafterCard, PassOutput, Trainee
from outrider.training.vocabulary import DraftVocabulary

OUTPUT = "lm_head.weight"


class Eagle3Trainee(Trainee):
    """An EAGLE-3 head in training. Its final norm and output rows begin as the target's. Other weights are random, and
    `warm_start` replaces some of them."""

    def __init__(self, target: Model, settings: TrainingSettings, vocabulary: DraftVocabulary) -> None:
        self._target, self._vocabulary = target, vocabulary
        self.num_passes = settings.passes
        self.sizes = HeadSizes.for_target(target, settings)
        fresh = begin_weights(weight_shapes(self.sizes, len(vocabulary.ids)), target, vocabulary, settings.seed)
        warm_start(fresh, self.sizes)
        self._frozen = {OUTPUT: fresh.pop(OUTPUT)} if settings.freeze_output else {}
        self.weights = {name: weight.requires_grad_() for name, weight in fresh.items()}
        self._network = Eagle3Network(self.sizes.form, self.weights)

    @classmethod
    def aux_layers_for(cls, target: Model, settings: TrainingSettings) -> tuple[int, ...]:
        return read_aux_layers(target, settings)

    def outputs(self, taught: TaughtTexts, rows: list[torch.Tensor]) -> Iterator[PassOutput]:
        embeds = self._target.embed_tokens.format.look_up(taught.tokens.flatten()).detach()
        slots = TextSlots.from_lengths(taught.lengths, taught.tokens.shape[1]).to(taught.tokens.device)
        passes = self._network.passes(embeds.view(*taught.tokens.shape, -1).float(), taught.aux_states, slots,
                                      self.num_passes)
        output = self._frozen.get(OUTPUT, self.weights.get(OUTPUT))
        assert output is not None
        for own_rows, states in zip(rows, passes, strict=False):  # texts of one token have no passes
            yield PassOutput(states.index_select(0, slots.rows_of(own_rows)), output)

    def export(self, folder: Path, card: DrafterCard, file_form: str) -> None:
        tensors = {name: weight.detach() for name, weight in (self.weights | self._frozen).items()}
        size = len(self._vocabulary.ids)
        if file_form == "speculators":
            config = self.sizes.speculators_config(size, self.num_passes, card.target_name)
            tensors = {name.replace(f"{LAYER}.", "layers.0."): tensor for name, tensor in tensors.items()}
        else:
            config = self.sizes.hf_config(size)
        write_drafter(folder, config, tensors, self._vocabulary, "eagle3", self.num_passes, card)


def begin_weights(shapes: Mapping[str, tuple[int, ...]], target: Model, vocabulary: DraftVocabulary,
                  seed: int) -> dict[str, torch.Tensor]:
    """Make fresh weights, float32 on the target's device: norms of 1, random matrices, and the target's final norm and
    output rows. Random numbers are drawn on the host, so that every device begins with equal weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    rows = target.lm_head.format.dense()
    if rows is not None:
        weights[OUTPUT] = rows[vocabulary.ids.to(rows.device)]
    if isinstance(target, Decoder):
        weights["norm.weight"] = target.norm.scale
    # Copies outside of inference mode: the target's tensors stay its own.
    return {name: weight.detach().to(target.device, torch.float32).clone() for name, weight in weights.items()}


def warm_start(weights: dict[str, torch.Tensor], sizes: HeadSizes) -> None:
    """Change fresh weights, in place, so that a head begins with properties that suit every target and need not learn
    them.

    The layer's input begins as the last auxiliary state alone, so that its residual stream has the basis that the
    target's output rows expect. Queries begin with the weights of their keys, so that a slot attends mostly to itself:
    a token influences the stream through attention only, and would otherwise begin as one of hundreds."""
    fc, key = weights["fc.weight"], weights[f"{LAYER}.self_attn.k_proj.weight"]
    last = sizes.aux_layers.index(max(sizes.aux_layers)) * sizes.hidden_size
    fc.zero_()
    fc[:, last : last + sizes.hidden_size].fill_diagonal_(1.0)
    group = sizes.num_heads // sizes.num_kv_heads
    weights[f"{LAYER}.self_attn.q_proj.weight"].copy_(
        key.unflatten(0, (sizes.num_kv_heads, 1, -1)).expand(-1, group, -1, -1).flatten(0, 2))
