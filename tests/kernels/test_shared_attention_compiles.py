"""The kernels for shared pages compile for an H200 that is not there: the interpreter takes what the compiler may
refuse. This file runs as a program, in which Triton does not interpret."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    assert set(found_without_interpreter(__file__)) == {"_find_shared_kernel", "_list_splits_kernel", "_packed_kernel"}


def compile_kernels() -> list[str]:
    from outrider.kernels.gpu.attention.decode import decode_attention
    from outrider.kernels.gpu.attention.sharing import find_shared
    from outrider.kernels.gpu.attention.splits import list_splits

    count, bounds = 16, {"max_query": 1, "max_length": 1024}
    pool = torch.zeros(4, 2, 16, 2, 128, dtype=torch.bfloat16)
    table, lengths = (torch.zeros(*shape, dtype=torch.int32) for shape in ((count, 64), (count,)))
    live, starts = torch.ones_like(lengths), torch.arange(count + 1, dtype=torch.int32)
    with compiling() as found:
        shared = find_shared(table, lengths, live, 16, max_length=1024)
        splits = list_splits(lengths, live, 8, 2, 128, 2, shared=shared, **bounds)
        decode_attention(torch.zeros(count, 8, 128, dtype=torch.bfloat16), pool[:, 0], pool[:, 1], table, starts,
                         lengths, live, scale=1.0, splits=splits, pdl=True, **bounds)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
