"""The kernels of adapters against torch: ranks, slots, parts of a layer, and bits that do not depend on other rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import (
    moe,
    ops,
)
from outrider.kernels.adapter_products import ExpertTargets, HeadColumns
from outrider.kernels.delta_tables import ALIGNMENT, NO_SLOT, DeltaTables, RowSlots, TargetRange

RANKS = ((16, 5, 16), (8, 0, 40), (0, 0, 0))  # of each slot and target
ENDS = (40, 72, 100)  # the targets' output features
TARGETS = TargetRange(1, ENDS)  # target 0 belongs to another layer
MOST_ROWS = 540
NUM_INPUTS = 1100  # several ranges, and a part of a block


def make_tables(device: torch.device, num_inputs: int = NUM_INPUTS,
                dtype: torch.dtype = torch.float32) -> DeltaTables:
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
    return DeltaTables(*(tensor.to(device) for tensor in tensors), max_rank=40)


def added(device: torch.device, kind: str, slots: list[int], first: int = 0, stop: int = ENDS[-1],
          num_inputs: int = NUM_INPUTS) -> torch.Tensor:
    """What is left in `out`, whose rows without an adapter begin as NaN."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(MOST_ROWS, num_inputs, generator=generator)[: len(slots)].to(device)
    out = torch.randn(MOST_ROWS, ENDS[-1], generator=generator)[: len(slots), first:stop].contiguous().to(device)
    own = torch.tensor(slots, device=device)
    out[own == NO_SLOT] = torch.nan
    rows, tables = RowSlots.from_slots(own), make_tables(device, num_inputs)
    with ops.using(kind, ops.reduce_adapters, ops.add_adapters):
        inner = ops.reduce_adapters(x, rows, tables, TARGETS.within(first, stop))
        ops.add_adapters(inner, out, first, rows, tables, TARGETS)
    return out


@pytest.mark.parametrize(("first", "stop"), [(0, 100), (40, 100), (0, 40), (50, 80)])
@pytest.mark.parametrize("kind", ["triton", "host", "native"])
def test_kernels_add_what_torch_adds(device: torch.device, kind: str, first: int, stop: int) -> None:
    device = device_of(kind, device)
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


@pytest.mark.parametrize("kind", ["reference", "triton", "native"])
def test_bits_of_a_row_do_not_depend_on_other_rows(device: torch.device, kind: str) -> None:
    """Alone, among rows with other adapters, and in a tile of many rows."""
    device = device if kind == "reference" else device_of(kind, device)
    few = added(device, kind, [0, 1, NO_SLOT, 0])
    assert added(device, kind, [0])[0].equal(few[0])
    assert added(device, kind, [0, NO_SLOT, 1, 1])[0].equal(few[0])
    if kind != "reference":
        assert added(device, kind, [0] * 5 + [NO_SLOT] * 20)[0].equal(few[0]), "a program of several rows"


SLOTS = [0, NO_SLOT, 1, 0, 2, 1, NO_SLOT, 1, *([1, 0] * 6)]
OTHER_RANKS = ((16, 5), (20, 0), (0, 0))  # of three slots and two targets


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranges_of_several_blocks_are_summed(device: torch.device, dtype: torch.dtype) -> None:
    """Ranges of more features than are loaded at once, as the last product of an 8B model's layers has them."""
    if dtype == torch.bfloat16 and device.type != "cuda":
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    num_inputs, slots = 9000, torch.tensor([0, 2, 1, 1], device=device)
    x = torch.randn(len(slots), num_inputs, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    rows, tables = RowSlots.from_slots(slots), make_tables(device, num_inputs, dtype)
    with ops.using("triton", ops.reduce_adapters):
        inner = ops.reduce_adapters(x, rows, tables, TARGETS.within(0, ENDS[-1]))
    wide = replace(tables, numbers=tables.numbers.float())
    with ops.using("torch", ops.reduce_adapters):
        wanted = ops.reduce_adapters(x.float(), rows, wide, TARGETS.within(0, ENDS[-1]))
    for place, slot in enumerate(rows.sorted_slots.tolist()):
        for target, rank in enumerate(RANKS[slot]):
            own, sums = (one.sum(dim=0)[place, target, :rank] for one in (inner, wanted))
            torch.testing.assert_close(own, sums, rtol=1e-3, atol=1e-2)


def other_tables(device: torch.device, sizes: list[tuple[int, int]], bounds: list[int]) -> DeltaTables:
    """Tables of one or two targets. sizes: numbers of both factors of a target, for each rank."""
    generator, size = torch.Generator().manual_seed(4), 0
    places = torch.zeros(len(OTHER_RANKS), len(sizes), 3, dtype=torch.int64)
    for slot, ranks in enumerate(OTHER_RANKS):
        for target, ((a, b), rank) in enumerate(zip(sizes, ranks, strict=False)):
            first, second = (-(-rank * count // ALIGNMENT) * ALIGNMENT for count in (a, b))
            places[slot, target] = torch.tensor([size, size + first, rank])
            size += first + second
    tensors = (torch.randn(size, generator=generator) / 4, places, torch.rand(3, len(sizes), generator=generator),
               torch.tensor([[0, bound] for bound in bounds]))
    return DeltaTables(*(tensor.to(device) for tensor in tensors), max_rank=20)


def drawn(device: torch.device, *shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def compare(device: torch.device, kind: str, operation: ops.Operation[..., None], out: torch.Tensor,
            call: Callable[[torch.Tensor, RowSlots], None]) -> None:
    """A kernel writes what the reference writes, and nothing into rows without an adapter, which begin as NaN."""
    slots, found = torch.tensor(SLOTS, device=device), []
    out[slots == NO_SLOT] = torch.nan
    for each in ("reference", kind):
        found.append(out.clone())
        with ops.using(each, operation):
            call(found[-1], RowSlots.from_slots(slots))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    assert found[1][slots == NO_SLOT].isnan().all() and found[1][slots == 2].equal(out[slots == 2])
    assert not found[1][slots == 0].equal(out[slots == 0]) and not found[1][slots == 1].equal(out[slots == 1])


def device_of(kind: str, device: torch.device) -> torch.device:
    if kind == "native" and not ops.has_native():
        pytest.skip("needs a C compiler")
    return device if kind == "triton" else torch.device("cpu")


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("kind", ["triton", "host"])
def test_activations_of_changed_products(device: torch.device, kind: str, activation: str) -> None:
    """Rows without an adapter have the bits of the activation alone."""
    device = device_of(kind, device)
    tables = other_tables(device, [(96, 40), (96, 40)], [40, 80])
    tables.bounds[1, 0] = 40
    slots = torch.tensor(SLOTS, device=device)
    x, before, found = drawn(device, len(SLOTS), 96), drawn(device, len(SLOTS), 80, seed=6), []
    for each in ("reference", kind):
        with ops.using(each, ops.reduce_adapters, ops.add_adapters_gated):
            rows = RowSlots.from_slots(slots)
            inner = ops.reduce_adapters(x, rows, tables, range(2))
            found.append(ops.add_adapters_gated(inner, before.clone(), activation, rows, tables,
                                                TargetRange(0, (40, 80))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    with ops.using(kind, ops.silu_mul, ops.gelu_tanh_mul) if kind == "triton" else nullcontext():
        alone = ops.gated(before, activation)
    is_plain = (slots == NO_SLOT) | (slots == 2)
    assert found[1][is_plain].equal(alone[is_plain]) and not (found[1] == alone)[~is_plain].any(1).all()


@pytest.mark.parametrize("kind", ["triton", "host"])
def test_embeddings_are_changed_as_torch_changes_them(device: torch.device, kind: str) -> None:
    device = device_of(kind, device)
    tables, tokens = other_tables(device, [(30, 40)], [40]), torch.arange(len(SLOTS), device=device) * 7 % 30
    compare(device, kind, ops.add_adapter_embeddings, drawn(device, len(SLOTS), 40),
            lambda out, rows: ops.add_adapter_embeddings(out, tokens, 3.0, rows, tables, 0))


@pytest.mark.parametrize("into_latents", [True, False])
@pytest.mark.parametrize("kind", ["triton", "host"])
def test_heads_are_changed_as_torch_changes_them(device: torch.device, kind: str, into_latents: bool) -> None:
    """Two heads of 24 keys and 16 values, 136 latent numbers, read from and written into wider rows."""
    device = device_of(kind, device)
    tables = other_tables(device, [(136, 80)], [80])
    columns = HeadColumns(40, 0, 24) if into_latents else HeadColumns(40, 24, 16)
    num_in, num_out = (24, 136) if into_latents else (136, 16)
    x = drawn(device, len(SLOTS), 2, num_in + 8)[..., :num_in]
    compare(device, kind, ops.add_head_adapters, drawn(device, len(SLOTS), 2, num_out + 8, seed=6)[..., :num_out],
            lambda out, rows: ops.add_head_adapters(x, out, rows, tables, 0, columns, into_latents))


@pytest.mark.parametrize(("kind", "activation"), [("triton", "silu"), ("triton", "relu2"), ("host", "silu")])
def test_experts_are_changed_as_torch_changes_them(device: torch.device, kind: str, activation: str) -> None:
    """Three experts, of which each token row has two; the second adapter changes the first projection alone. Gate and
    up were adapted apart: together they have twice the largest rank."""
    device = device_of(kind, device)
    rows, inner = (2, 1)[activation == "relu2"] * 24, 24
    tables = other_tables(device, [(3 * 40, 3 * rows), (3 * inner, 3 * 40)], [rows, 40])
    tables = replace(tables, max_rank=tables.max_rank * inner // rows)
    x, added, logits = (drawn(device, len(SLOTS), size, seed=size) for size in (40, 40, 3))
    routed = moe.route(logits, moe.RouteRule(3, 2))
    parts = drawn(device, 3, rows, 40) / 4, drawn(device, 3, 40, inner) / 4
    compare(device, kind, ops.mix_adapted_experts, drawn(device, len(SLOTS), 40, seed=7),
            lambda out, named: ops.mix_adapted_experts(out, x, *routed, *parts, activation, added, named, tables,
                                                       ExpertTargets(0, 1)))


def test_wrappers_refuse_rows_of_another_batch(device: torch.device) -> None:
    from outrider.kernels.gpu.adapters.linear import add_adapters, add_adapters_gated, reduce_adapters

    x, out, tables = torch.zeros(3, NUM_INPUTS, device=device), torch.zeros(3, 100, device=device), make_tables(device)
    two, three = (RowSlots.from_slots(torch.zeros(rows, dtype=torch.int64, device=device)) for rows in (2, 3))
    inner = reduce_adapters(x, three, tables, range(1, 4), pdl=False)
    with pytest.raises(ValueError, match="slots"):
        reduce_adapters(x, two, tables, range(1, 4), pdl=False)
    with pytest.raises(ValueError, match="targets"):
        reduce_adapters(x, three, tables, range(1, 5), pdl=False)
    with pytest.raises(ValueError, match="slots"):
        add_adapters(inner, out, 0, two, tables, TARGETS, pdl=False)
    with pytest.raises(ValueError, match="slots"):
        add_adapters(inner, out[:2], 0, three, tables, TARGETS, pdl=False)
    with pytest.raises(ValueError, match="inner"):
        add_adapters(inner, out[:, :40], 0, three, tables, TARGETS, pdl=False)
    with pytest.raises(ValueError, match="inner"):
        add_adapters_gated(inner, out, "silu", three, tables, TargetRange(1, (50, 100)), pdl=False)


@pytest.mark.parametrize("runs", [[], [1], [16], [17], [3, 40, 1, 16, 16, 33], [1] * 20])
def test_segments_are_whole_runs_of_a_slot(runs: list[int]) -> None:
    """Each run of a slot is cut into segments of 16 rows and a last one of the rest; nothing lies behind them."""
    slots = [slot for slot, count in enumerate(runs, start=NO_SLOT) for _ in range(count)]
    shuffled = torch.tensor(slots, dtype=torch.int64)[torch.randperm(len(slots), generator=torch.manual_seed(0))]
    rows = RowSlots.from_slots(shuffled)
    assert rows.sorted_slots.tolist() == slots and shuffled[rows.order].tolist() == slots
    assert all(found.equal(own) for found, own in zip(ops.sort_slots(shuffled), rows, strict=True))
    wanted, at = [], 0
    for slot, count in enumerate(runs, start=NO_SLOT):
        wanted += [[at + begin, min(at + begin + 16, at + count), slot] for begin in range(0, count, 16)]
        at += count
    assert rows.segments.tolist() == wanted + [[at, at, NO_SLOT]] * (at - len(wanted))
    assert len(wanted) <= RowSlots.most_segments(at, max(0, len(runs) - 1))


def test_programs_go_through_several_pieces_of_work(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of three programs and of one write what a launch with one for each piece writes, to the bit."""
    from outrider.kernels.gpu.adapters import linear as adapters

    slots = [0, NO_SLOT, 1, 0, 2, 1, *[0] * 20]
    wanted = added(device, "triton", slots, num_inputs=300)
    for programs in (3, 1):
        monkeypatch.setattr(adapters, "_MAX_PROGRAMS", programs)
        assert added(device, "triton", slots, num_inputs=300).nan_to_num().equal(wanted.nan_to_num())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_both_kernels() -> None:
    from tests.kernels.compiled import found_without_interpreter

    assert set(found_without_interpreter(__file__)) >= {
        "_shrink_kernel", "_expand_kernel", "_expand_gated_kernel", "_head_kernel"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of kernels as they are compiled without a card")
def test_factors_and_rows_are_loaded_in_whole_vectors() -> None:
    """Loads of single 16-bit numbers made these kernels several times slower than the bytes that they move: a hint of
    the compiler's went with a sum that it removed."""
    from tests.kernels.compiled import found_without_interpreter

    assert found_without_interpreter(__file__, "loads") == {
        "_shrink_kernel": 0, "_expand_kernel": 0, "_expand_gated_kernel": 0}


def narrow_loads() -> dict[str, int]:
    """How many loads of single numbers the kernels for two products of usual sizes have."""
    from outrider.kernels.gpu.adapters.linear import add_adapters, add_adapters_gated, reduce_adapters
    from tests.kernels.compiled import compiling

    ptx: list[str] = []
    rows = RowSlots.from_slots(torch.zeros(64, dtype=torch.int64))
    x = torch.zeros(64, 4096, dtype=torch.bfloat16)
    with compiling(ptx) as found:
        for ends in ((4096, 5120, 6144), (14336, 28672)):
            tables = replace(other_tables(torch.device("cpu"), [(1, 1)] * len(ends), [1] * len(ends)),
                             numbers=torch.zeros(64, dtype=torch.bfloat16), max_rank=64)
            inner = reduce_adapters(x, rows, tables, range(len(ends)), pdl=True)
            out = torch.zeros(64, ends[-1], dtype=torch.bfloat16)
            if len(ends) == 2:
                add_adapters_gated(inner, out, "silu", rows, tables, TargetRange(0, ends), pdl=True)
            else:
                add_adapters(inner, out, 0, rows, tables, TargetRange(0, ends), pdl=True)
    return {name: text.count("ld.global.b16") for name, text in zip(found, ptx, strict=True)}


def compile_kernels() -> list[str]:
    from outrider.kernels.gpu.adapters.experts import mix_adapted_experts
    from outrider.kernels.gpu.adapters.heads import add_head_adapters
    from outrider.kernels.gpu.adapters.linear import add_adapters, add_adapters_gated, reduce_adapters
    from tests.kernels.compiled import compiling

    with compiling() as found:
        for tokens, pdl in ((4, True), (300, True), (600, False)):
            tables = make_tables(torch.device("cpu"), 4096, torch.bfloat16)
            x = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
            out = torch.zeros(tokens, ENDS[-1], dtype=torch.bfloat16)
            rows = RowSlots.from_slots(torch.zeros(tokens, dtype=torch.int64))
            inner = reduce_adapters(x, rows, tables, TARGETS.within(0, ENDS[-1]), pdl=pdl)
            add_adapters(inner, out, 0, rows, tables, TARGETS, pdl=pdl)
            ends = TargetRange(0, (128, 256))
            places, scales = (table[:, :2].contiguous() for table in (tables.places, tables.scales))
            gated = replace(tables, bounds=torch.tensor([[0, 128], [128, 256]]), places=places, scales=scales)
            product = torch.zeros(tokens, 256, dtype=torch.bfloat16)
            add_adapters_gated(inner[:, :, :2].contiguous(), product, "silu", rows, gated, ends, pdl=pdl)
        heads = [torch.zeros(8, 16, size, dtype=torch.bfloat16) for size in (128, 512)]
        named = RowSlots.from_slots(torch.zeros(8, dtype=torch.int64))
        one, two = (replace(other_tables(torch.device("cpu"), [(1, 1)] * count, [1] * count),
                            numbers=torch.zeros(64, dtype=torch.bfloat16)) for count in (1, 2))
        add_head_adapters(*heads, named, one, 0, HeadColumns(256, 0, 128), True, pdl=True)
        add_head_adapters(*heads[::-1], named, one, 0, HeadColumns(256, 128, 128), False, pdl=True)
        hidden = torch.zeros(8, 2048, dtype=torch.bfloat16)
        parts = (torch.zeros(4, *shape, dtype=torch.bfloat16) for shape in ((1536, 2048), (2048, 768)))
        routed = torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 2)
        mix_adapted_experts(hidden, hidden.clone(), *routed, *parts, "silu", None, named, two, ExpertTargets(0, 1),
                            pdl=True)
    return found


if __name__ == "__main__":
    print(json.dumps(narrow_loads() if sys.argv[1:] == ["loads"] else compile_kernels()))
