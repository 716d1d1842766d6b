"""What kernels move of recurrent states, counted address by address: once in and once out, whatever the drafts.

Under the interpreter alone, which shows every address; so the name keeps it from the tests that a card runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs the triton package")

from tests.kernels.test_triton_recurrent import Part, Twins

MOST = 7


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Any:
    """moved(tensor) -> (bytes read, bytes written) of it since it was last asked."""
    if device.type != "cpu":
        pytest.skip("a card does not say which addresses it reads")
    builder, loads, stores = interpreter.InterpreterBuilder, [], []
    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loads.append(pointers.data[mask.data.astype(bool)])
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        stores.append(pointers.data[mask.data.astype(bool)])
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counting_load)
    monkeypatch.setattr(builder, "create_masked_store", counting_store)

    def of(tensors: list[torch.Tensor]) -> tuple[Counter[int], Counter[int]]:
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        seen = tuple(Counter(int(a) for part in parts for a in part.flatten() if any(x <= a < y for x, y in spans))
                     for parts in (loads, stores))
        loads.clear()
        stores.clear()
        return seen  # type: ignore[return-value]

    return of


def test_states_are_read_once_and_written_once_for_any_number_of_drafts(device: torch.device, moved: Any) -> None:
    twins = Twins(torch.float32, device, window=MOST)
    states = [own.state for own in twins.both[1].layers.values()]
    lives = [twins.admit(1), twins.admit(3)]
    wanted = sum(state[0].numel() for state in states) * len(lives)
    moved(states)
    for drafts in range(MOST + 1):
        # All of the last step's drafts are folded now.
        twins.step([Part(life, 1, drafts, accepted=drafts) for life in lives])
        reads, writes = moved(states)
        assert len(reads) == len(writes) == wanted and reads.keys() == writes.keys(), "every element of the two rows"
        assert set(reads.values()) == set(writes.values()) == {1}, f"once, with {drafts} drafts"
