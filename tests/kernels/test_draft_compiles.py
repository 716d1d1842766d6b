"""The kernels of drafters' bookkeeping compile for an H200 that is not there: the interpreter takes what the compiler
may refuse. This file runs as a program, in which Triton does not interpret."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    assert set(found_without_interpreter(__file__)) == {"_passes_kernel", "_first_slots_kernel", "_forget_kernel",
                                                        "_block_kernel"}


def compile_kernels() -> list[str]:
    from outrider.kernels.drafting import AdmittedRows, CommittedRequests, DrafterCacheState, DraftingRows
    from outrider.kernels.gpu.drafts import blocks as draft_blocks
    from outrider.kernels.gpu.drafts import first_slots
    from outrider.kernels.gpu.drafts import passes as draft

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    tables = (ints(4, 64, dtype=torch.int32), ints(4, 32, dtype=torch.int32))
    own = DrafterCacheState((16, 32), 1, 1, 512, ints(9), ints(9), ints(40, 1024, dtype=torch.bool)[:, 3])
    requests = CommittedRequests(ints(4), ints(5), ints(12), ints(4), ints(4), ints(4, dtype=torch.bool))
    rows = DraftingRows(ints(9, 1024), ints(9), ints(9), ints(9), torch.zeros(9))
    with compiling() as found:
        draft.plan_draft_passes(requests, rows, tables, own, num_wanted=3)
        draft_blocks.plan_block_passes(requests, rows, tables, own, num_wanted=3, num_rows=4)
        draft.forget_pages(requests, tables, own)
        for needs_tail in (False, True):
            first_slots.plan_first_slots(AdmittedRows(ints(4), ints(4), ints(4), ints(2, 4)), tables, own,
                                         needs_tail=needs_tail, num_chained=0, is_filled=True)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
