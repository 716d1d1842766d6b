"""Memory behind tensors: every holder of one is found, and what is given back comes again as it should."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from outrider.runner import storages
from outrider.runner.storages import FreedMemory, find_storages


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


@dataclass(frozen=True, slots=True)
class Slotted:
    tensor: torch.Tensor


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.itself = tensor, self

    def method(self) -> None: ...


def tensor() -> torch.Tensor:
    return torch.ones(3)


@pytest.mark.parametrize("hold", [
    lambda t: t, lambda t: t[1:], lambda t: [t], lambda t: {"a": (1, t)}, lambda t: MappingProxyType({1: t}),
    lambda t: Pair(t, None), lambda t: Slotted(t), Holder, lambda t: Holder(t).method,
    lambda t: functools.partial(print, t, end=""), lambda t: functools.partial(print, end=t), lambda t: {Slotted(t)},
])
def test_tensors_are_found_wherever_they_are_held(hold: Any) -> None:
    own = tensor()
    assert list(find_storages([hold(own), "text", None, torch.float32])) == [own.untyped_storage()._cdata]


def test_what_only_refers_to_a_tensor_does_not_hold_it() -> None:
    own = tensor()
    holder = Holder(own)
    roots = [weakref.ref(holder), Holder, lambda: own, torch.empty(3, device="meta")]
    assert not find_storages(roots)


def test_a_storage_is_found_once_for_all_its_views() -> None:
    own = tensor()
    assert len(find_storages([own, own[1:], own.view(3, 1), own.clone()])) == 2


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_content_comes_back_if_it_is_kept_and_as_zeros_otherwise(keeps: bool, moves: bool,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "_can_move", lambda storage: moves)
    monkeypatch.setattr(storages, "_to_host", torch.clone)
    monkeypatch.setattr(storages, "PIECE_BYTES", 1 << 14)
    whole = torch.arange(10_000, dtype=torch.float64)
    view, expected = whole.view(100, 100)[3:, 5], whole.clone() if keeps else torch.zeros(10_000, dtype=torch.float64)
    memory = FreedMemory(find_storages([whole, view]).values(), keeps=keeps)
    for _ in range(2):  # it may be freed again before what restored it is done
        num_freed = memory.free()
        assert memory.total_bytes == 80_000 and memory.host_bytes == 80_000 * (keeps and moves)
        assert num_freed == 80_000 if moves else (num_freed == 0) == keeps
        memory.restore()
        assert torch.equal(whole, expected) and torch.equal(view, expected.view(100, 100)[3:, 5])
    memory.free()
    assert (memory.drop_content() > 0) == (keeps and not moves) and memory.drop_content() == 0
    memory.restore()
    assert not whole.any()
