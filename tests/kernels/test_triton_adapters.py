"""The kernels of adapters against torch: ranks, slots, parts of a layer, and bits that do not depend on other rows."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import ops  # noqa: E402
from outrider.kernels.adapters import ALIGNMENT, NO_SLOT, AdapterTables, RowSlots, TargetRange  # noqa: E402

RANKS = ((16, 5, 16), (8, 0, 40), (0, 0, 0))  # of each slot and target
ENDS = (40, 72, 100)  # the targets' output features
TARGETS = TargetRange(1, ENDS)  # target 0 belongs to another layer
MOST_ROWS = 540
NUM_INPUTS = 1100  # several ranges, and a part of a block


def make_tables(device: torch.device, num_inputs: int = NUM_INPUTS,
                dtype: torch.dtype = torch.float32) -> AdapterTables:
    generator = torch.Generator().manual_seed(1)
    begins = (0, *ENDS[:-1])
    places, numbers = torch.zeros(len(RANKS), len(ENDS) + 1, 3, dtype=torch.int64), list[torch.Tensor]()
    size = 0
    for slot, ranks in enumerate(RANKS):
        for target, (rank, begin, end) in enumerate(zip(ranks, begins, ENDS, strict=True), start=1):
            a, b = (-(-count // ALIGNMENT) * ALIGNMENT for count in (rank * num_inputs, rank * (end - begin)))
            places[slot, target] = torch.tensor([size, size + a, rank])
            numbers.append(torch.randn(a + b, generator=generator) / 8)
            size += a + b
    bounds = torch.tensor([[0, 7], *zip(begins, ENDS, strict=True)])
    scales = torch.rand(len(RANKS), len(ENDS) + 1, generator=generator)
    tensors = torch.cat(numbers).to(dtype), places, scales, bounds
    return AdapterTables(*(tensor.to(device) for tensor in tensors), max_rank=40)


def added(device: torch.device, kind: str, slots: list[int], first: int = 0, stop: int = ENDS[-1],
          num_inputs: int = NUM_INPUTS) -> torch.Tensor:
    """What is left in `out`, whose rows without an adapter begin as NaN."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(MOST_ROWS, num_inputs, generator=generator)[: len(slots)].to(device)
    out = torch.randn(MOST_ROWS, ENDS[-1], generator=generator)[: len(slots), first:stop].contiguous().to(device)
    own = torch.tensor(slots, device=device)
    out[own == NO_SLOT] = torch.nan
    with ops.using(kind, ops.add_adapters):
        ops.add_adapters(x, out, first, RowSlots.from_slots(own), make_tables(device, num_inputs), TARGETS)
    return out


@pytest.mark.parametrize(("first", "stop"), [(0, 100), (40, 100), (0, 40), (50, 80)])
@pytest.mark.parametrize("kind", ["triton", "host"])
def test_kernels_add_what_torch_adds(device: torch.device, kind: str, first: int, stop: int) -> None:
    if kind == "host":
        device = torch.device("cpu")
    slots = [0, NO_SLOT, 1, 0, 2, 1]
    wanted, got = (added(device, each, slots, first, stop) for each in ("reference", kind))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    plain = added(device, "reference", [NO_SLOT] * 6, first, stop)
    assert got[1].isnan().all() and plain.isnan().all()


@pytest.mark.parametrize("num_rows", [20, pytest.param(520, marks=pytest.mark.long)])
def test_tiles_of_many_rows_go_through_their_slots(device: torch.device, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(-1, 3, (num_rows,), generator=generator).tolist()
    wanted, got = (added(device, kind, slots, num_inputs=96) for kind in ("reference", "triton"))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_bits_of_a_row_do_not_depend_on_other_rows(device: torch.device, kind: str) -> None:
    """Alone, among rows with other adapters, and in a tile of many rows."""
    few = added(device, kind, [0, 1, NO_SLOT, 0])
    assert added(device, kind, [0])[0].equal(few[0])
    assert added(device, kind, [0, NO_SLOT, 1, 1])[0].equal(few[0])
    if kind == "triton":
        assert added(device, kind, [0] * 5 + [NO_SLOT] * 20)[0].equal(few[0]), "a program of several rows"


def test_wrappers_refuse_rows_of_another_batch(device: torch.device) -> None:
    from outrider.kernels.triton.adapters import add_adapters

    x, out = torch.zeros(3, NUM_INPUTS, device=device), torch.zeros(3, 100, device=device)
    two, three = (RowSlots.from_slots(torch.zeros(rows, dtype=torch.int64, device=device)) for rows in (2, 3))
    with pytest.raises(ValueError, match="slots"):
        add_adapters(x, out, 0, two, make_tables(device), TARGETS, pdl=False)
    with pytest.raises(ValueError, match="out"):
        add_adapters(x, out[:2], 0, three, make_tables(device), TARGETS, pdl=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_both_kernels() -> None:
    from tests.kernels.compiled import found_without_interpreter

    assert set(found_without_interpreter(__file__)) == {"_shrink_kernel", "_expand_kernel"}


def compile_kernels() -> list[str]:
    from outrider.kernels.triton.adapters import add_adapters
    from tests.kernels.compiled import compiling

    with compiling() as found:
        for tokens, pdl in ((4, True), (300, True), (600, False)):
            tables = make_tables(torch.device("cpu"), 4096, torch.bfloat16)
            x = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
            out = torch.zeros(tokens, ENDS[-1], dtype=torch.bfloat16)
            rows = RowSlots.from_slots(torch.zeros(tokens, dtype=torch.int64))
            add_adapters(x, out, 0, rows, tables, TARGETS, pdl=pdl)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
