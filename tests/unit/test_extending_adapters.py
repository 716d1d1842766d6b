"""Adapters from outside the package: products of one request's token rows are changed, those of all others are not."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from outrider.core import Admission
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.core.outputs import RequestOutput
from outrider.layers import DeltaSource, Linear, RowDeltas, find_modules
from outrider.models.base import Model
from tests.engine.harness import CONFIGS, VOCAB, Rig, greedy, prompt_of, random_model
from tests.engine.recurrent_rig import HYBRIDS

NAMES = ("first", "second")
NUM_ROWS = 8  # of the engines here, and more
HYBRID = "mamba2"


@dataclass(frozen=True)
class NamedChange(RequestPart):
    """A request names its adapter."""

    name: str

    @property
    def cache_key(self) -> str:
        return f"change={self.name}"


@dataclass(frozen=True)
class Change:
    """What an adapter adds to a product: x down up."""

    down: torch.Tensor  # [inputs, rank]
    up: torch.Tensor  # [rank, outputs]


class LowRankAdapters(DeltaSource):
    """Changes of every linear layer of a model, drawn for each name; `DeltaSource` of an engine."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._of_row = torch.full((NUM_ROWS,), -1)  # index of the adapter's name, by row; -1 for the model itself
        self._changes = {(name, id(linear)): self._draw(f"{name} {index}", linear)
                         for name in NAMES for index, linear in enumerate(linears)}

    @staticmethod
    def _draw(seed: str, linear: Linear) -> Change:
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        down, up = (0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
                    for shape in ((linear.in_features, 2), (2, linear.out_features)))
        return Change(down, up)

    def change(self, name: str, linear: Linear) -> torch.Tensor:
        found = self._changes[name, id(linear)]
        return (found.down @ found.up).t()

    def admit(self, admissions: Sequence[Admission]) -> None:
        for own in admissions:
            named = own.request.part(NamedChange)
            self._of_row[own.row] = -1 if named is None else NAMES.index(named.name)

    def serves(self, rows: Sequence[int]) -> bool:
        return bool((self._of_row[rows] >= 0).any())

    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> TokenRowAdapters:
        return TokenRowAdapters(self._changes, self._of_row[rows][request_of])


@dataclass(frozen=True)
class TokenRowAdapters(RowDeltas):
    changes: dict[tuple[str, int], Change]
    of_token: torch.Tensor  # [tokens] index of the adapter's name, -1 for none

    def of_rows(self, token_rows: torch.Tensor) -> TokenRowAdapters:
        return replace(self, of_token=self.of_token[token_rows])

    def add_to(self, out: torch.Tensor, linear: Any, x: torch.Tensor, first: int) -> None:
        assert len(x) == len(self.of_token) == len(out), "the context is of other token rows"
        for index, name in enumerate(NAMES):
            found = self.changes.get((name, id(linear)))
            rows = (self.of_token == index).nonzero().flatten()
            if found is not None and len(rows):
                up = found.up[:, first : first + out.shape[1]]
                out[rows] += (x[rows].double() @ found.down @ up).to(out.dtype)


def linears_of(model: Model) -> list[Linear]:
    return find_modules([model], Linear)


def merged(model: Model, adapters: LowRankAdapters, name: str) -> Model:
    """A copy of the model whose weights have the changes of an adapter added."""
    own = copy.deepcopy(model)
    for mine, theirs in zip(linears_of(own), linears_of(model), strict=True):
        mine.format.dense().add_(adapters.change(name, theirs))
    own.finalize()
    return own


@functools.cache
def model_of(family: str) -> Model:
    config = HYBRIDS[family] if family in HYBRIDS else CONFIGS[family]
    return random_model(config | {"tie_word_embeddings": False}, torch.float64, 7)


def generate(rig: Rig, prompts: Sequence[list[int]], names: Sequence[str | None]) -> list[RequestOutput]:
    outputs = rig.outputs
    check: Callable[..., Any] = rig.engine.checks.check
    done: dict[str, RequestOutput] = {}
    for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        request: CheckedRequest = check(prompt, greedy(14))
        if name is not None:
            request = request.with_part(NamedChange(name))
        rig.engine.add({str(index): request})
        outputs._outputs[str(index)] = RequestOutput.empty(str(index), None, prompt, greedy(14))
    while rig.engine.has_work:
        done |= {output.request_id: output for output in outputs.step() if output.finished}
    rig.assert_clean()
    return [done[str(index)] for index in range(len(prompts))]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    assert all(output.outputs[0].error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family, drafts", [("llama", 2), ("gemma3", 0), (HYBRID, 2)])
def test_an_adapter_changes_its_own_request_alone(family: str, drafts: int) -> None:
    model = model_of(family)
    settings: dict[str, Any] = {"pad_requests": (4,), "pad_tokens": (8, 64)}
    if drafts:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "auto": False,
                                          "prompt_lookup_min": 1}
    prompts = [prompt_of(3, 20, VOCAB) * 2, prompt_of(4, 33, VOCAB), prompt_of(3, 20, VOCAB) * 2, prompt_of(5, 7)]
    names = ["first", None, None, "second"]  # the first and the third have one prompt, and share no page
    adapters = LowRankAdapters(linears_of(model))
    wanted: list[list[int]] = []
    for prompt, name in zip(prompts, names, strict=True):
        with Rig(model if name is None else merged(model, adapters, name), **settings) as alone:
            wanted += tokens_of(generate(alone, [prompt], [None]))
    assert wanted[0] != wanted[2], "the adapter changes nothing"
    with Rig(model, **settings) as rig:
        rig.step.take_deltas(adapters)
        assert tokens_of(generate(rig, prompts, names)) == wanted
        assert tokens_of(generate(rig, prompts[::-1], names[::-1])) == wanted[::-1], "pages of the first run are found"


class Watching(LowRankAdapters):
    """Notes which layers were asked for the adapters' part of their products."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__(linears)
        self.asked: set[int] = set()

    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> TokenRowAdapters:
        own = super().of_step(rows, request_of)
        return WatchedRows(own.changes, own.of_token, self.asked)


@dataclass(frozen=True)
class WatchedRows(TokenRowAdapters):
    asked: set[int]

    def add_to(self, out: torch.Tensor, linear: Any, x: torch.Tensor, first: int) -> None:
        self.asked.add(id(linear))
        super().add_to(out, linear, x, first)


def test_fused_layers_leave_requests_with_an_adapter_to_the_plain_layers() -> None:
    """A float32 model on the CPU has native layers, which multiply without asking anybody."""
    sizes = {"tie_word_embeddings": False, "hidden_size": 128, "head_dim": 32}  # heads that native layers take
    model = random_model(CONFIGS["llama"] | sizes, torch.float32, 7)
    adapters = Watching(linears_of(model))
    with Rig(model, poison=False) as rig:
        rig.step.take_deltas(adapters)
        generate(rig, [[5]], ["first"])
    assert adapters.asked == {id(linear) for linear in linears_of(model)}
