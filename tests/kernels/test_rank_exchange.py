"""Sums and gathers over ranks by the kernel, one rank after the other: what each writes is what the next waits for."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

import triton.language as tl

from outrider.kernels.gpu import rank_exchange
from outrider.kernels.gpu.rank_exchange import (
    BUFFER_BYTES,
    CHUNK_BYTES,
    FLAG_BYTES,
    PROGRAMS,
    Exchange,
    gather_over_ranks,
    sum_over_ranks,
)
from tests.kernels.compiled import compiling, found_without_interpreter

COUNT = 3


class Ranks:
    """Ranks whose kernels run one after the other in this process. Before a rank runs, the parts of those behind it are
    put where their kernels will put them."""

    def __init__(self, first_number: int = 0) -> None:
        self.buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(COUNT)]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.exchanges = [
            Exchange(rank, COUNT, addresses, torch.full((PROGRAMS,), first_number, dtype=torch.int32),
                     torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0)
            for rank in range(COUNT)
        ]
        for buffer in self.buffers:
            buffer[:FLAG_BYTES].view(torch.int32).fill_(first_number)

    def write(self, rank: int, part: torch.Tensor) -> None:
        """One round of one rank, without its reading."""
        size = CHUNK_BYTES // part.element_size()
        places = self.buffers[rank][FLAG_BYTES:].view(part.dtype).view(2, PROGRAMS, size)
        for program, chunk in enumerate(part.flatten().split(size)):
            number = int(self.exchanges[rank].counts[program]) + 1
            places[number & 1, program, : len(chunk)] = chunk
            for buffer in self.buffers:
                flags = buffer[:FLAG_BYTES].view(torch.int32).view(-1, PROGRAMS)
                flags[rank, program] = torch.tensor(number).to(torch.int32)


@pytest.mark.parametrize("first_number", [0, 2**31 - 2])
def test_parts_are_added_in_the_order_of_ranks(first_number: int) -> None:
    """Parts of less than a chunk, of some and of as many as programs, one after the other; counts that overflow."""
    ranks = Ranks(first_number)
    chunk = CHUNK_BYTES // 4
    for turn, numel in enumerate((5, 2 * chunk + 1, chunk, 3 * chunk, 7)):
        generator = torch.Generator().manual_seed(turn)
        parts = [torch.randn(numel, generator=generator) * 10.0**rank for rank in range(COUNT)]
        for rank, exchange in enumerate(ranks.exchanges):
            for other in range(rank + 1, COUNT):
                ranks.write(other, parts[other])
            total = sum_over_ranks(parts[rank], exchange, pdl=False)
            assert torch.equal(total, (parts[0] + parts[1]) + parts[2])


def test_parts_are_gathered_side_by_side() -> None:
    ranks = Ranks()
    parts = [torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(COUNT)]
    for rank, exchange in enumerate(ranks.exchanges):
        for other in range(rank + 1, COUNT):
            ranks.write(other, parts[other])
        assert torch.equal(gather_over_ranks(parts[rank], exchange, pdl=False), torch.cat(parts, -1))


class Clock:
    """Stands in for the device's clock, which the interpreter lacks: each reading is a step later than the last."""

    def __init__(self, *steps_ns: int) -> None:
        self._steps_ns = [0, *steps_ns]
        self._now_ns = 2**60
        self.num_readings = 0

    def globaltimer(self) -> tl.tensor:
        self._now_ns += self._steps_ns[min(self.num_readings, len(self._steps_ns) - 1)]
        self.num_readings += 1
        return tl.cast(self._now_ns, tl.int64)


@pytest.mark.parametrize("bound_s", [1.0, 3.0, 10.0])
def test_a_rank_that_does_not_come_is_named_after_the_bound(monkeypatch: pytest.MonkeyPatch, bound_s: float) -> None:
    """Rank 1 is there, rank 2 is not. Sums behind the one that gave up wait for nothing, and the name stays."""
    clock = Clock(50_000_000)
    monkeypatch.setattr(rank_exchange, "cuda", clock)
    monkeypatch.setattr(rank_exchange, "POLLS_PER_CLOCK_READ", 1)
    ranks = Ranks()
    exchange = replace(ranks.exchanges[0], max_wait_ns=int(bound_s * 1e9))
    part = torch.ones(5)
    ranks.write(1, part)
    sum_over_ranks(part, exchange, pdl=False)
    num_steps = round(bound_s / 0.05) + 1  # the first that is above the bound
    # A reading at the begin of each of two waits, the steps, and one to find what the last of them wrote.
    assert clock.num_readings == 2 + num_steps + 1
    assert exchange.late.tolist() == exchange.given_up.tolist() == [3]
    clock.num_readings = 0
    sum_over_ranks(part, exchange, pdl=False)  # without rank 1 as well
    assert clock.num_readings <= 4 and exchange.late.tolist() == [3]


def test_a_rank_that_comes_in_time_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set while a rank waits, forwards or backwards, counts for one step at most."""
    ranks = Ranks()
    part = torch.ones(5)
    ranks.write(1, part)

    class Arrival(Clock):
        def globaltimer(self) -> tl.tensor:
            if self.num_readings == 12:
                ranks.write(2, part)
            return super().globaltimer()

    clock = Arrival(1000, 1000, 2**32, -(2**33), 2**32, 50_000_000)
    monkeypatch.setattr(rank_exchange, "cuda", clock)
    monkeypatch.setattr(rank_exchange, "POLLS_PER_CLOCK_READ", 1)
    exchange = replace(ranks.exchanges[0], max_wait_ns=1_000_000_000)
    assert torch.equal(sum_over_ranks(part, exchange, pdl=False), torch.full((5,), 3.0))
    assert clock.num_readings >= 12 and exchange.late.tolist() == exchange.given_up.tolist() == [0]


def test_bad_parts_are_refused() -> None:
    exchange = Ranks().exchanges[0]
    with pytest.raises(ValueError, match="not packed"):
        sum_over_ranks(torch.zeros(4, 6).t(), exchange)
    with pytest.raises(ValueError, match="part"):
        sum_over_ranks(torch.zeros(4, dtype=torch.int32), exchange)
    assert sum_over_ranks(torch.zeros(0, 6), exchange).shape == (0, 6)


def test_it_compiles_for_an_h200() -> None:
    """Flags are raised and awaited for the whole system, and the clock is read."""
    found = found_without_interpreter(__file__)
    assert len(found) == 2
    for ptx in found:
        assert re.search(r"sys\.release|release\.sys", ptx) and re.search(r"sys\.acquire|acquire\.sys", ptx)
        assert "ld.volatile.global.v4.b32" in ptx  # 16 bytes at a time
        assert "globaltimer" in ptx


def main() -> None:
    with compiling():
        exchange = Exchange(0, 2, torch.zeros(2, dtype=torch.int64), torch.zeros(PROGRAMS, dtype=torch.int32),
                            torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 10**9)
        for function in (sum_over_ranks, gather_over_ranks):
            function(torch.zeros(64, 4096, dtype=torch.bfloat16), exchange, pdl=True)
    caches = rank_exchange._exchange_kernel.function.device_caches.values()
    print(json.dumps([kernel.asm["ptx"] for kernels, *_ in caches for kernel in kernels.values()]))


if __name__ == "__main__":
    main()
