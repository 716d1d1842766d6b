"""Launches that are found again compute what they should: a kernel compiled for other arguments would read elsewhere.

Vectors of 16 bytes are read where Triton knows an address to be a multiple, and fail where it is not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu.conftest import HAS_CARD

pytestmark = pytest.mark.skipif(not HAS_CARD, reason="needs a card")
pytest.importorskip("triton", reason="needs the triton package")

import triton.language as tl
from triton.runtime.jit import JITFunction

from outrider.kernels.gpu.launch.triton_kernel import kernel

LENGTH = 1024


@kernel
def _add_kernel(x, y, out, stride, number, pair, scale, LENGTH: tl.constexpr, TWICE: tl.constexpr = False):
    row = tl.program_id(0).to(tl.int64)
    at = row * stride + tl.arange(0, LENGTH)
    value = tl.load(x + at).to(tl.float32) * scale + tl.load(y + at).to(tl.float32) + number % 97
    value += tl.load(pair[0] + tl.arange(0, LENGTH)) + pair[1]
    tl.store(out + at, (value * 2 if TWICE else value).to(out.dtype.element_ty))


def test_launches_are_found_and_right() -> None:
    device, asked, run = torch.device("cuda", 0), [0], JITFunction.run

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        asked[0] += 1
        return run(self, *args, **options)

    def rows(offset: int, dtype: torch.dtype, stride: int) -> torch.Tensor:
        return torch.randn(3 * stride + 32, device=device).to(dtype)[offset:].as_strided((3, LENGTH), (stride, 1))

    first = (torch.float32, 0, 0, LENGTH, 2, 5, False)
    others = (torch.bfloat16,), (1, 4), (8, 1), (LENGTH + 1,), (1, 16, 2**40), (1,), (True,)
    changed = [(*first[:index], value, *first[index + 1 :]) for index, values in enumerate(others) for value in values]
    cases = [first, *changed, first]  # each compiles a kernel, but where Triton takes two for the same
    with mock.patch.object(JITFunction, "run", watched):
        for again in range(2):
            asked[0] = 0
            for dtype, offset, other, stride, number, second, twice in cases:
                x, y = rows(offset, dtype, stride), rows(other, torch.float32, stride)
                out, added = rows(other, torch.float32, stride).fill_(float("nan")), torch.randn(LENGTH, device=device)
                _add_kernel[(3,)](x, y, out, stride, number, (added, second), 0.5, LENGTH=LENGTH, TWICE=twice)
                wanted = (x.float() * 0.5 + y + number % 97 + added + second) * (2 if twice else 1)
                assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-5), (dtype, offset, other, stride, number)
            assert asked[0] == 0 if again else 0 < asked[0] < len(cases)


def test_launches_go_to_the_current_stream_and_into_graphs() -> None:
    device = torch.device("cuda", 0)
    x, y, added = (torch.randn(LENGTH, device=device) for _ in range(3))
    out = torch.zeros_like(x)

    def launch() -> None:
        _add_kernel[(1,)](x, y, out, LENGTH, 3, (added, 7), 0.5, LENGTH=LENGTH)

    launch()
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted), "the graph has the launch"
    out.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(20_000_000)
        launch()
        done = torch.cuda.Event()
        done.record()
    assert not done.query() and bool((out == 0).all()), "the other stream still waits"
    done.synchronize()
    assert torch.equal(out, wanted)
