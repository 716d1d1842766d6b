"""The bookkeeping of a proposal by the C code: plan_draft_passes and forget_pages of `kernels.drafting`, with its
types."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.structures import DRAFT_PLAN, DRAFT_TABLE, PLANNED_PASSES
from outrider.kernels.drafting import (
    CommittedRequests,
    DrafterCacheState,
    DraftingRows,
    DraftPass,
    DraftPasses,
    DraftSamplingKeys,
    Tables,
)

PLAN_ERRORS = {1: "a row, a request or a page is out of range", 2: "a position is outside of the rows or a page table"}
_NO_ROWS = dict.fromkeys(("row_tokens", "known", "seed", "sample_index", "temperature", "length", "token_stride",
                          "num_wanted"), 0)


def takes_plan(requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *,
               num_wanted: int) -> bool:
    single = rows.known, rows.seed, rows.sample_index
    return (
        takes_forget(requests, tables, own) and num_wanted > 0 and all(map(_is_packed, single))
        and rows.tokens.is_cpu and rows.tokens.dtype is torch.int64 and rows.tokens.stride(1) == 1
        and rows.temperature.dtype is torch.float32 and rows.temperature.stride(0) == 1
    )


def takes_forget(requests: CommittedRequests, tables: Tables, own: DrafterCacheState) -> bool:
    *counts, goes_on = requests
    return (
        all(map(_is_packed, (*counts, own.valid_from, own.filled))) and goes_on.dtype is torch.bool
        and goes_on.is_contiguous() and own.page_valid.dtype is torch.bool and own.page_valid.is_cpu
        and all(table.is_cpu and table.dtype is torch.int32 and table.stride(1) == 1 for table in tables)
    )


def _is_packed(x: Tensor) -> bool:
    return x.is_cpu and x.dtype is torch.int64 and x.stride(0) == 1


def _check(requests: CommittedRequests, tables: Tables, own: DrafterCacheState) -> None:
    count = requests.rows.shape[0]
    per_request = requests.computed_before, requests.num_computed, requests.goes_on, *tables
    assert all(x.shape[0] == count for x in per_request) and requests.query_starts.shape[0] == count + 1, \
        "rows of page tables, counts and query starts differ"
    assert len(tables) == len(own.page_tokens) and own.valid_from.shape == own.filled.shape


def _committed(requests: CommittedRequests, own: DrafterCacheState) -> dict[str, int]:
    """Pack the fields that both functions take."""
    return dict(
        rows=requests.rows.data_ptr(), query_starts=requests.query_starts.data_ptr(),
        request_of=requests.request_of.data_ptr(), computed_before=requests.computed_before.data_ptr(),
        num_computed=requests.num_computed.data_ptr(), goes_on=requests.goes_on.data_ptr(),
        valid_from=own.valid_from.data_ptr(), filled=own.filled.data_ptr(), page_valid=own.page_valid.data_ptr(),
        requests=requests.rows.shape[0], tokens=requests.request_of.shape[0], num_rows=own.filled.shape[0],
        num_pages=own.page_valid.shape[0], page_stride=own.page_valid.stride(0), groups=len(own.page_tokens),
        tail_group=own.tail_group, first_position=own.first_position, max_len=own.max_len,
    )


def _pack_tables(tables: Tables, own: DrafterCacheState, slots: tuple[Tensor, ...] = (),
                 further: tuple[Tensor, ...] = ()) -> bytes:
    return b"".join(
        DRAFT_TABLE.pack(pages=table.data_ptr(), slots=slots[at].data_ptr() if slots else 0,
                         further_slots=further[at].data_ptr() if further else 0, stride=table.stride(0),
                         width=table.shape[1], page_tokens=size)
        for at, (table, size) in enumerate(zip(tables, own.page_tokens, strict=True))
    )


def pack_plan(requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *,
              num_wanted: int) -> bytes:
    """Pack the inputs from which the C code plans a proposal."""
    _check(requests, tables, own)
    assert rows.known.shape == rows.temperature.shape == own.filled.shape and rows.tokens.shape[0] == len(own.filled)
    return DRAFT_PLAN.pack(
        **_committed(requests, own), row_tokens=rows.tokens.data_ptr(), known=rows.known.data_ptr(),
        seed=rows.seed.data_ptr(), sample_index=rows.sample_index.data_ptr(), temperature=rows.temperature.data_ptr(),
        length=rows.tokens.shape[1], token_stride=rows.tokens.stride(0), num_wanted=num_wanted,
    )


def plan_draft_passes(requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *,
                      num_wanted: int) -> DraftPasses:
    plan = pack_plan(requests, rows, tables, own, num_wanted=num_wanted)
    count, tokens, groups = requests.rows.shape[0], requests.request_of.shape[0], len(tables)
    later = (num_wanted - 1) * count
    sizes = [tokens] * (3 + groups) + [count] * 7 + [num_wanted * count] + [later] * (3 + groups)
    parts = torch.empty(sum(sizes), dtype=torch.int64).split(sizes)
    positions, token_ids, tail_page = parts[:3]
    slots = parts[3 : 3 + groups]
    lengths, live, key_starts, seed, sample_index, counts, last = parts[3 + groups : 10 + groups]
    draft_positions, further_positions, further_lengths, further_live = parts[10 + groups : 14 + groups]
    further_slots = parts[14 + groups :]
    narrow = torch.empty(3 * count + 2 * later, dtype=torch.int32).split([count] * 3 + [later] * 2)
    temperature = torch.empty(count)
    planned = PLANNED_PASSES.pack(
        positions=positions.data_ptr(), tokens=token_ids.data_ptr(), tail_page=tail_page.data_ptr(),
        lengths=lengths.data_ptr(), live=live.data_ptr(), key_starts=key_starts.data_ptr(), seed=seed.data_ptr(),
        sample_index=sample_index.data_ptr(), counts=counts.data_ptr(), last=last.data_ptr(),
        draft_positions=draft_positions.data_ptr(), further_positions=further_positions.data_ptr(),
        further_lengths=further_lengths.data_ptr(), further_live=further_live.data_ptr(),
        lengths32=narrow[0].data_ptr(), live32=narrow[1].data_ptr(), key_starts32=narrow[2].data_ptr(),
        further_lengths32=narrow[3].data_ptr(), further_live32=narrow[4].data_ptr(),
        temperature=temperature.data_ptr(),
    )
    if error := library().plan_draft_passes(plan, _pack_tables(tables, own, slots, further_slots), planned):
        raise IndexError(f"plan_draft_passes: {PLAN_ERRORS[error]}")
    passes = [x.view(num_wanted - 1, count).unbind()
              for x in (further_positions, further_lengths, further_live, *narrow[3:], *further_slots)]
    further = [DraftPass(own_positions, tuple(own_slots), *counts_of)
               for own_positions, *counts_of, own_slots in
               zip(*passes[:5], zip(*passes[5:], strict=True), strict=True)]
    keys = DraftSamplingKeys(temperature, seed, sample_index, draft_positions.view(num_wanted, count), counts, last)
    first = DraftPass(positions, tuple(slots), lengths, live, narrow[0], narrow[1])
    return DraftPasses(keys, token_ids, first, further, key_starts, narrow[2], tail_page)


def forget_pages(requests: CommittedRequests, tables: Tables, own: DrafterCacheState) -> None:
    _check(requests, tables, own)
    plan = DRAFT_PLAN.pack(**_committed(requests, own), **_NO_ROWS)
    if error := library().forget_pages(plan, _pack_tables(tables, own)):
        raise IndexError(f"forget_pages: {PLAN_ERRORS[error]}")
