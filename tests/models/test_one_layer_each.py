"""While kernels are compiled and loaded, one layer of each kind runs. Start-up asks for that with every step."""

from __future__ import annotations

import torch

from outrider.formats.slots import WeightSlot
from outrider.layers.base import DecoderLayer, LayeredModule, PassingLayer


class Layer(DecoderLayer):
    num_asked = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        Layer.num_asked += 1
        return {"weight": WeightSlot(torch.zeros(self.size))}


class Layers(LayeredModule):
    def __init__(self, *sizes: int) -> None:
        self.layers = [Layer(size) for size in sizes]


def ran(layers: LayeredModule) -> list[bool]:
    """Which of the layers run in the context."""
    with layers.one_layer_each():
        return [not isinstance(layer, PassingLayer) for layer in layers.layers]


def test_the_first_of_each_kind_runs_and_the_last() -> None:
    layers = Layers(2, 3, 2, 3, 3)
    all_of_them = layers.layers
    assert ran(layers) == [True, True, False, False, True]
    assert layers.layers is all_of_them


def test_kinds_are_looked_for_once() -> None:
    layers = Layers(2, 3, 3, 3)
    ran(layers)
    before = Layer.num_asked
    assert ran(layers) == [True, True, False, True] and Layer.num_asked == before


def test_a_layer_that_was_replaced_is_seen() -> None:
    layers = Layers(2, 2, 2)
    assert ran(layers) == [True, False, True]
    layers.layers = [layers.layers[0], Layer(5), layers.layers[2]]
    assert ran(layers) == [True, True, True]


def test_contexts_may_be_nested() -> None:
    layers = Layers(2, 2, 2)
    with layers.one_layer_each():
        assert ran(layers) == [True, False, True]
    assert ran(layers) == [True, False, True]
