"""Decoder layers with adapters as one native call on the CPU: the bits of their parts, and no others for any mates."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.adapter_loading import with_adapter
from outrider.core import Admission, Limits, ScheduledBatch
from outrider.core.checked_request import NO_REQUEST
from outrider.features.adapters.on_device import with_adapters
from outrider.features.adapters.placements import AdapterPlacement, AdapterPlacements
from outrider.features.adapters.store import AdapterStore
from outrider.kernels import cpu as native
from outrider.layers import RowDeltas, StepContext
from outrider.layers.context import LinearLayer
from outrider.layers.fuse import prepare
from outrider.mixers.cached import CachedLayers
from outrider.mixers.paged.native_backend import NativeBackend
from outrider.models.base import Model
from tests.adapters.folders import merged, write_adapter
from tests.engine.test_quantized import CONFIG, MIXED, QWEN3, build
from tests.models.paged import PagedModel, Piece

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
RANKS = (3, 20)  # of two adapters: fewer than a thread takes at once, and more
LAYERS = 3
EMPTY_BATCH = ScheduledBatch(0, [], [], [], [], [], [], [])
REQUESTS = ([5, 3, 1], [7] * 2, list(range(20)), [9, 2, 6])  # more rows of one adapter than are computed together
MODELS: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {
    "float32": (CONFIG, {}, False), "biases and norms": (QWEN3, {}, False), "Q4_1": (CONFIG, {}, True),
    "several kinds": (QWEN3, MIXED, True),
}


@pytest.fixture(autouse=True)
def keep_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are kept whatever a busy machine measures."""
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)


def model_of(name: str) -> Model:
    config, kinds, keep = MODELS[name]
    model = build(config | {"num_hidden_layers": LAYERS}, kinds, keep)
    prepare([model], allow_copies=False)
    return model


@contextmanager
def two_adapters(model: Model, folder: Path) -> Iterator[AdapterStore]:
    """A store with the adapters 0 and 1 in their slots. The second one leaves `up_proj` and `k_proj` alone."""
    changed = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    limits = with_adapters(Limits(8, 8, 64, 0, 96), model, 2, max(RANKS), None)
    store, offset = AdapterStore(model, max(RANKS), limits), 0
    for number, names in enumerate((("_proj",), changed)):
        path = write_adapter(folder / str(number), model, number, RANKS[number], 0.1, names)
        store.read(number, str(number), str(path))
        size = store._loads[number].result().size
        placed = AdapterPlacements((AdapterPlacement(number, number, offset),))
        store.begin(replace(EMPTY_BATCH, parts=(placed,)))
        offset += size
    yield store
    store.close()


def hidden_of(model: Model, adapters: AdapterStore | None, pieces: Sequence[tuple[int, int | None]],
              aux_layers: tuple[int, ...] = ()) -> list[list[torch.Tensor]]:
    """Hidden states of each request's token rows in two steps: auxiliary states and the last layer's. pieces: which of
    REQUESTS, each with the number of its adapter."""
    pages = PagedModel(model)
    pages.cached = CachedLayers(model.attention_layers, pages.pool, NativeBackend())
    found: list[list[torch.Tensor]] = [[] for _ in pieces]
    if adapters is not None:
        adapters.admit([Admission(request, with_adapter(NO_REQUEST, number), 0, 96) for request, number in pieces])
    for tokens in (lambda text: text, lambda text: [text[0], 4]):  # a prompt, and a token with a draft behind it
        own = [Piece(request, tokens(REQUESTS[request])) for request, _ in pieces]
        view = pages.view(own)
        rows = None if adapters is None else adapters.of_step(view.rows, view.request_of)
        context = StepContext(pages.cached.bind(view), view.positions, deltas=rows)
        hidden = model.forward(view.token_ids, context, aux_layers)
        for place, piece in enumerate(own):
            found[place] += [state[view.request_of == place] for state in (*hidden.aux_states, hidden.final)]
            pages.lengths[piece.request] += len(piece.tokens)
    return found


def are_equal(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> bool:
    return all(a.equal(b) for own, others in zip(found, wanted, strict=True) for a, b in zip(own, others, strict=True))


BATCH = [(0, 1), (1, None), (2, 0), (3, 1)]


@pytest.mark.parametrize("name", MODELS)
def test_native_layers_give_the_bits_of_their_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts, decoder_layer = model_of(name), list[int](), native.decoder_layer

    def watched(bound: native.BoundLayer, *args: Any) -> torch.Tensor | None:
        added = decoder_layer(bound, *args)
        assert added is not None and args[3] is not None, "the layers leave the native call, or their adapters do"
        counts.append(bound.count)
        return added

    with two_adapters(model, tmp_path) as store:
        monkeypatch.setattr(native, "decoder_layer", watched)
        whole, tapped = hidden_of(model, store, BATCH), hidden_of(model, store, BATCH, (1,))
        assert counts == [LAYERS] * 4  # auxiliary states lie within the call
        monkeypatch.setattr(native, "decoder_layer", lambda *args: None)
        assert are_equal(whole, hidden_of(model, store, BATCH))
        assert are_equal(tapped, hidden_of(model, store, BATCH, (1,)))


@pytest.mark.parametrize("name", ["biases and norms", "Q4_1"])
def test_a_request_has_the_same_bits_alone_and_beside_any_adapters(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    with two_adapters(model, tmp_path) as store:
        together = hidden_of(model, store, BATCH)
        alone = [hidden_of(model, store, [piece])[0] for piece in BATCH]
        assert are_equal(together, alone)
        without = hidden_of(model, None, BATCH)
        assert are_equal([together[1]], [without[1]]), "the request without an adapter is as in an engine without any"
        assert not any(are_equal([together[place]], [without[place]]) for place in (0, 2, 3))


@pytest.mark.parametrize("name", ["float32", "biases and norms"])
def test_native_layers_add_what_the_factors_say(name: str, tmp_path: Path) -> None:
    """Beside a model in float64 whose weights have the products of the factors added."""
    model, config = model_of(name), MODELS[name][0] | {"num_hidden_layers": LAYERS}
    base = build(config, {}, False, torch.float64)
    with two_adapters(model, tmp_path) as store:
        found = hidden_of(model, store, BATCH)
    for place, (request, number) in enumerate(BATCH):
        own = copy.deepcopy(base) if number is None else merged(base, tmp_path / str(number))
        pages, rows = PagedModel(own), list[torch.Tensor]()
        for tokens in (REQUESTS[request], [REQUESTS[request][0], 4]):
            rows.append(pages.forward([Piece(request, tokens)]).final)
        for step, wanted in zip(found[place], rows, strict=True):
            torch.testing.assert_close(step.double(), wanted[: len(step)], rtol=1e-4, atol=1e-4)


def test_adapters_that_are_no_tables_of_factors_are_asked_product_by_product() -> None:
    class Counts(RowDeltas):
        count = 0

        def of_rows(self, token_rows: torch.Tensor) -> RowDeltas:
            return self

        def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
            self.count += 1

    model, own = model_of("float32"), Counts()
    pages = PagedModel(model)
    pages.cached = CachedLayers(model.attention_layers, pages.pool, NativeBackend())
    view = pages.view([Piece(0, [3, 1])])
    model.forward(view.token_ids, StepContext(pages.cached.bind(view), view.positions, deltas=own))
    assert own.count == 4 * LAYERS
