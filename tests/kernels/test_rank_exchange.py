"""Sums and gathers over ranks by the kernel, one rank after the other: what each writes is what the next waits for."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.triton import rank_exchange  # noqa: E402
from outrider.kernels.triton.rank_exchange import (  # noqa: E402
    BUFFER_BYTES,
    CHUNK_BYTES,
    FLAG_BYTES,
    PROGRAMS,
    Exchange,
    gather_over_ranks,
    sum_over_ranks,
)
from tests.kernels.compiled import compiling, found_without_interpreter  # noqa: E402

COUNT = 3


class Ranks:
    """Ranks whose kernels run one after the other in this process. Before a rank runs, the parts of those behind it are
    put where their kernels will put them."""

    def __init__(self, first_number: int = 0) -> None:
        self.buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(COUNT)]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.exchanges = [
            Exchange(rank, COUNT, addresses, torch.full((PROGRAMS,), first_number, dtype=torch.int32),
                     torch.zeros(1, dtype=torch.int32), 0)
            for rank in range(COUNT)
        ]  # fmt: skip
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
                            torch.zeros(1, dtype=torch.int32), 10**9)
        for function in (sum_over_ranks, gather_over_ranks):
            function(torch.zeros(64, 4096, dtype=torch.bfloat16), exchange, pdl=True)
    caches = rank_exchange._exchange_kernel.function.device_caches.values()
    print(json.dumps([kernel.asm["ptx"] for kernels, *_ in caches for kernel in kernels.values()]))


if __name__ == "__main__":
    main()
