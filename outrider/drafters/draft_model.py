"""A smaller model as drafter. Its layers keep their cache in the same pool of pages as the target's layers. It must
have the target's vocabulary."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from outrider.cache.groups import LayerCache
from outrider.config import SpeculativeConfig
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import DraftBuild
from outrider.drafters.files import drafter_source
from outrider.formats import RankGroup
from outrider.layers import StepContext, check_ranks
from outrider.mixers import Attend, WantedRows
from outrider.models.base import Hidden, Model
from outrider.models.loader import load_model
from outrider.models.registry import build_model
from outrider.models.sources import ModelSource

log = logging.getLogger("outrider")


class _ShiftedLayers:
    """Gives a model whose layers are numbered from 0 its layers' caches, which have higher numbers in the engine."""

    def __init__(self, attend: Attend, first: int) -> None:
        self._attend, self._first = attend, first

    def mixer(self, layer: int) -> Any:
        return self._attend.mixer(layer + self._first)


class DraftModelNetwork:
    """A DraftNetwork around a Model; its layers are numbered after the target's."""

    hidden_size = 0
    target_ids = None

    def __init__(self, model: Model, first_layer: int, target_vocab: int) -> None:
        if model.vocab_size != target_vocab:
            raise ValueError(
                f"the draft model has a vocabulary of {model.vocab_size} tokens and the target of {target_vocab}: "
                "use a draft model of the same family"
            )
        if model.recurrent_layers:
            raise ValueError(f"the draft model ({type(model).__name__}) has recurrent layers, which a draft model "
                             "cannot have: use one with attention layers only, or another method")
        self._model, self._first = model, first_layer
        self.num_outputs = model.vocab_size
        self.follows_components = False
        self.attention_layers = [replace(layer, index=layer.index + first_layer) for layer in model.attention_layers]

    def cache_layers(self) -> list[LayerCache]:
        return [replace(layer, layer=layer.layer + self._first,
                        reads=None if layer.reads is None else layer.reads + self._first)
                for layer in self._model.cache_layers()]

    def consume(self, hidden: Hidden) -> None:
        return None

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor | None, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        own = None
        if rows is not None:
            own = WantedRows(rows.token_rows, lambda: {i - self._first: layer for i, layer in rows.layers.items()})
        shifted = StepContext(_ShiftedLayers(context.attend, self._first), context.positions,
                              rope_positions=context.rope_positions, given_rows=context.given_rows)
        final = self._model.forward(tokens, shifted, rows=own).final
        return final, final

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self._model.logits(hidden, context)

    def module(self) -> Model:
        return self._model

    def weight_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._model.weights().values())


def model_drafter(config: SpeculativeConfig, build: DraftBuild) -> AutoregressiveDrafter:
    model = _load_model(config, build)
    network = DraftModelNetwork(model, build.first_layer, build.target.vocab_size)
    return AutoregressiveDrafter("draft_model", network, config.num_speculative_tokens,
                                 max_positions=model.max_positions)


def _load_model(config: SpeculativeConfig, build: DraftBuild) -> Model:
    source = drafter_source(config, build)
    model = load_model(source, dtype=build.dtype, device=build.device, load_format=build.load_format, seed=build.seed,
                       keep_quantized=build.keep_quantized, group=_shared_by(source, build))
    if model.max_positions < build.max_len:
        log.warning("the draft model %s has %d positions and max_model_len is %d: longer texts get no drafts from it",
                    config.model, model.max_positions, build.max_len)
    return model


def _shared_by(source: ModelSource, build: DraftBuild) -> RankGroup | None:
    """Return the ranks that share the weights of the draft model: the target's ranks. If the model's sizes cannot be
    divided among them, each rank holds all of it."""
    group = build.target.group
    if group is None:
        return None
    try:
        check_ranks(build_model(source.config, dtype=build.dtype, device="meta", source=str(source.config_file)),
                    group.count)
    except ValueError as error:
        log.warning("every rank holds the whole draft model: %s", error)
        return None
    return group
