"""The product with adapters' first factors runs beside the layer's product: where it does, and where it may not."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from functools import partial
from itertools import groupby
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.delta_tables import DeltaTables, RowSlots
from outrider.kernels.gpu.adapters.linear import reduce_adapters
from outrider.kernels.gpu.adapters.slots import sort_slots
from outrider.kernels.gpu.hopper import few_rows
from outrider.kernels.gpu.launch.triton_kernel import collecting, note_product
from tests.kernels.test_triton_adapters import make_tables

SHARED_BYTES = 233472  # of a multiprocessor of a Hopper card, of which each program takes 1024 more than it asks for


class Layer(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor  # more than 16 MB
    rows: RowSlots
    tables: DeltaTables

    def reduce(self, pdl: bool = True) -> torch.Tensor:
        return reduce_adapters(self.x, self.rows, self.tables, range(1, 4), pdl=pdl)


def make_layer(device: torch.device, num_inputs: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Layer:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, num_inputs, generator=generator).to(device, dtype)
    rows = RowSlots.from_slots(torch.tensor([0, 1, 2, -1, 0, 0, 1, -1], device=device))
    return Layer(x, torch.zeros(4096, num_inputs, dtype=dtype, device=device), rows,
                 make_tables(device, num_inputs, dtype))


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    return make_layer(torch.device("cpu"))


def launched(*calls: Callable[[], object]) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the kernels that these calls launch."""
    found: list[tuple[str, dict[str, Any]]] = []
    with collecting(lambda function, args, options: found.append((function.fn.__name__, options))):
        for call in calls:
            call()
    return found


def test_runs_beside_a_large_product_that_lies_directly_before_it(layer: Layer) -> None:
    def is_beside(*before: Callable[[], object]) -> bool:
        name, options = launched(*before, layer.reduce)[-1]
        assert name == "_shrink_kernel"
        return bool(options["BESIDE"])

    def in_a_thread() -> None:
        thread = Thread(target=lambda: launched(product))
        thread.start()
        thread.join()

    product = partial(few_rows.few_rows_linear, layer.x, layer.weight, pdl=True)
    assert not is_beside()
    assert is_beside(product)
    assert not is_beside(product, layer.reduce), "another kernel lies between them"
    assert not is_beside(partial(few_rows.few_rows_linear, layer.x.clone(), layer.weight, pdl=True)), "other token rows"
    small = layer.weight[:2048]
    assert not is_beside(partial(few_rows.few_rows_linear, layer.x, small, pdl=True)), "it releases at its start"
    assert not is_beside(in_a_thread)
    reductions = [options["BESIDE"] for name, options in launched(product, layer.reduce) if name == "_shrink_kernel"]
    assert reductions == [False, True], "both are compiled: steps with more token rows have another product"


def test_sums_do_not_take_memory_that_the_product_still_writes(layer: Layer) -> None:
    scratch: list[weakref.ref[torch.Tensor]] = []

    def look(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if function.fn.__name__ == "_few_rows_kernel":
            assert options["SPLITS"] > 1
            scratch.append(weakref.ref(args[3]))

    with collecting(look):
        few_rows.few_rows_linear(layer.x, layer.weight, pdl=True)
        assert scratch[-1]() is not None
        layer.reduce()
        assert scratch[-1]() is None, "it is kept no longer"


@pytest.mark.parametrize("num_inputs", [600, pytest.param(9000, marks=pytest.mark.long)])
def test_sums_are_the_same_beside_a_product(device: torch.device, num_inputs: int) -> None:
    own = make_layer(device, num_inputs, torch.bfloat16 if device.type == "cuda" else torch.float16)
    pdl = device.type == "cuda"
    alone = own.reduce(pdl)
    note_product(own.x, own.x)
    beside = own.reduce(pdl)
    for place, slot in enumerate(own.rows.sorted_slots.tolist()):
        ranks = own.tables.places[max(slot, 0), 1:, 2].tolist() if slot >= 0 else [0] * 3
        for target, rank in enumerate(ranks):
            one, other = (each[:, place, target, :rank] for each in (alone, beside))
            if device.type == "cuda":
                assert one.equal(other)
            else:  # the interpreter adds in another order
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a kernel as it is compiled without a card")
def test_waits_at_its_end_and_fits_beside_a_product() -> None:
    from tests.kernels.compiled import found_without_interpreter

    found = found_without_interpreter(__file__)
    assert found["sorts"] == 2, "the kernel that sorts the rows compiles, too"
    assert found["steps"] == ["launch_dependents", "mma", "wait"]
    assert found["reads_past_l1"], "a copy of the token rows in an L1 cache may be older than they are"
    assert 2 * (found["shared"] + 1024) + few_rows.LARGE_RING_BYTES + 2048 <= SHARED_BYTES


def compile_beside() -> dict[str, Any]:
    from triton.runtime import driver

    from tests.kernels.test_sampler_compiles import Card

    driver.set_active(Card())  # type: ignore[arg-type]
    made: list[Any] = []

    def compile_one(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if options.get("BESIDE", True):
            made.append(function.run(*args, grid=(1,), warmup=True, **options))

    own = make_layer(torch.device("cpu"))
    with collecting(compile_one):
        for count in (8, 500):
            sort_slots(torch.zeros(count, dtype=torch.int64))
        note_product(own.x, own.x)
        own.reduce()
    *sorting, kernel = made
    ptx = kernel.asm["ptx"]
    steps = [first or second for first, second in re.findall(r"griddepcontrol\.(\w+)|(mma)\.sync", ptx)]
    return {"steps": [step for step, _ in groupby(steps)], "reads_past_l1": "ld.global.cg" in ptx,
            "shared": kernel.metadata.shared, "sorts": len(sorting)}


if __name__ == "__main__":
    print(json.dumps(compile_beside()))
