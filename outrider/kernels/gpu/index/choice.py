"""Chooses the top-k positions of few token rows for sparse attention, from the scores that `scores.py` computed,
without a sort.

There are two kernels. Each program has some segments of a token row's positions, so that a few long contexts use the
whole GPU. The first kernel lists candidates in any order; a sample of the scores says which positions are candidates
(see `search.py`). In the second kernel, each program finds the smallest score that is chosen among all candidates of
its token row, counts the candidates before its segments, and writes the chosen positions of its segments in order. No
result depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton import knobs

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.hopper.index_decode import launch_scores, takes_few_rows
from outrider.kernels.gpu.index.scores import ScoreConfig, index_scores
from outrider.kernels.gpu.index.search import (
    ALIGNED,
    count_kinds,
    least_candidate,
    least_chosen,
    least_chosen_in_memory,
    list_candidates,
    load_listed,
    load_orders,
    needs_list,
    room_for,
    sample_size,
    write_all,
    write_chosen,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import NUM_COUNTERS, TokenContexts

MAX_SCORES = 1 << 26  # that exist at a time, with the numbers of the lists of candidates
SEGMENT = 2048  # positions
LISTING = 2  # programs that list candidates, for each multiprocessor; of those that choose there is one
MAX_REGISTERS = 200  # of a program that chooses
MAX_POSITIONS = 1 << 22
_INTS = ["first", "stop", "chosen"]


@kernel(do_not_specialize=["num_splits", "top_k"], do_not_specialize_on_alignment=_INTS)
def _candidates_kernel(
    first, stop, scores, lists, num_listed, scores_stride, num_splits, top_k,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, SEG: tl.constexpr, PDL: tl.constexpr,
):
    """List the candidates of token rows that have more positions than there is room for."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    begin = low // ALIGNED * ALIGNED + tl.program_id(1) * SEG
    if needs_list(low, high, ROOM) & (high - low > top_k) & (begin < high):
        own, at = scores + row * scores_stride, lists + row * (2 * ROOM)
        position, is_visible, order = load_orders(own, begin, low, high, SEG)
        least = least_candidate(own, low, high, top_k, ROOM, SAMPLE)
        for start in range(begin, high, num_splits * SEG):
            is_candidate = is_visible & (order >= least)
            so_far = tl.cumsum(is_candidate.to(tl.int32), axis=0)
            count = tl.sum(is_candidate.to(tl.int32), axis=0)
            before = tl.atomic_add(num_listed + row, count, sem="relaxed")
            list_candidates(at, before + so_far - 1, position, order, is_candidate, ROOM)
            position, is_visible, order = load_orders(own, start + num_splits * SEG, low, high, SEG)


@kernel(do_not_specialize=["num_splits", "top_k"], do_not_specialize_on_alignment=_INTS)
def _choice_kernel(
    first, stop, scores, lists, num_listed, chosen, scores_stride, chosen_stride, num_splits, top_k,
    ROOM: tl.constexpr, SEG: tl.constexpr, PDL: tl.constexpr,
):
    """Write the chosen positions of a token row's segments: those with scores above the least chosen score, and as many
    of those equal to it as are still needed."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    count = tl.load(num_listed + row)
    own, at, to = scores + row * scores_stride, lists + row * (2 * ROOM), chosen + row * chosen_stride
    begin = low // ALIGNED * ALIGNED + tl.program_id(1) * SEG
    is_large = needs_list(low, high, ROOM)
    if high - low <= top_k:
        write_all(to, low, high, top_k, tl.program_id(1) * SEG, num_splits * SEG, SEG)
    elif begin < high:
        count = tl.where(is_large, count, high - low)
        if is_large & ((count < top_k) | (count > ROOM)):  # a sample misled: every program searches in memory
            least, missing = least_chosen_in_memory(own, low, high, top_k, SEG)
            for start in range(begin, high, num_splits * SEG):
                num_above, num_equal = count_kinds(own, low // ALIGNED * ALIGNED, start, low, high, least, SEG)
                position, is_visible, order = load_orders(own, start, low, high, SEG)
                write_chosen(to, position, is_visible, order, least, missing, num_above, num_equal, top_k)
        else:
            position, is_visible, order = load_orders(own, begin, low, high, SEG)
            if is_large:
                place, is_there, candidate = load_listed(at, 0, count, ROOM, ROOM)
            else:
                place, is_there, candidate = load_orders(own, low // ALIGNED * ALIGNED, low, high, ROOM)
            least, missing = least_chosen(candidate, is_there, count, top_k)
            kind = tl.where(candidate > least, 65536, tl.where(is_there & (candidate == least), 1, 0))
            for start in range(begin, high, num_splits * SEG):
                before = tl.sum(tl.where(place < start, kind, 0), axis=0)
                write_chosen(to, position, is_visible, order, least, missing, before >> 16, before & 65535, top_k)
                position, is_visible, order = load_orders(own, start + num_splits * SEG, low, high, SEG)


def choose_positions(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor,
    scales: torch.Tensor | None = None, counters: torch.Tensor | None = None, *, config: ScoreConfig | None = None,
    segment: int = SEGMENT, room: int | None = None, num_splits: int | None = None, pdl: bool | None = None,
) -> None:
    """Write the top-k cached positions of each token row, those with the highest indexer scores, to `chosen`. Token
    rows are scored in batches so that the scores of a batch fit into MAX_SCORES numbers. See
    `kernels.latent.choose_positions` for the arguments."""
    pdl = uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_keys, top_k = check_choice(q, weights, keys, contexts, chosen, scales)
    if counters is not None:
        require_tensor("choose_positions", "counters", counters, (num_tokens, NUM_COUNTERS), q.device, (torch.int32,),
                       inner_contiguous=2)
    if num_tokens == 0:
        return
    room = room or room_for(top_k)
    step = max(1, min(num_tokens, MAX_SCORES // (num_keys + (2 * room if num_keys > room else 0))))
    columns = cdiv(num_keys, ALIGNED.value) * ALIGNED.value
    scores = torch.empty(step, columns, dtype=torch.float32, device=q.device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        own, count = contexts.cut(rows), rows.stop - rows.start
        if counters is None or step < num_tokens:
            counters = torch.zeros(count, NUM_COUNTERS, dtype=torch.int32, device=q.device)
        if config is None and takes_few_rows(q, keys, scales):
            launch_scores(q[rows], weights[rows], keys, own, top_k, scores, pdl)
        else:
            index_scores(q[rows], weights[rows], keys, own, top_k, scores, scales, config=config,
                         num_splits=num_splits, pdl=pdl)
        choose_by_scores(scores, counters, own, chosen[rows], segment=segment, room=room, num_splits=num_splits,
                         pdl=pdl)


def choose_by_scores(
    scores: torch.Tensor, num_listed: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor, *,
    segment: int = SEGMENT, room: int | None = None, sample: int | None = None, num_splits: int | None = None,
    pdl: bool,
) -> None:
    """Write the chosen positions from given scores [tokens, positions], whose rows must be padded to a multiple of
    ALIGNED positions. num_listed: a zero for each token row."""
    (count, top_k), num_keys, sms = chosen.shape, scores.shape[1], num_sms(scores.device)
    room, most = room or room_for(top_k), cdiv(num_keys, segment)
    lists = torch.empty(count if num_keys > room else 0, 2, room, dtype=torch.int32, device=scores.device)
    given = (contexts.first, contexts.stop, scores, lists, num_listed)
    options = {"ROOM": room, "SEG": segment, "PDL": pdl, **pdl_options(pdl)}
    if num_keys > room:
        splits = num_splits or max(1, min(most, LISTING * sms // count))
        _candidates_kernel[(count, splits)](*given, scores.stride(0), splits, top_k, num_warps=4,
                                            SAMPLE=sample or sample_size(num_keys, top_k), **options)
    splits = num_splits or max(1, min(most, sms // count))
    limit: dict[str, int] = {} if knobs.runtime.interpret else {"maxnreg": MAX_REGISTERS}
    _choice_kernel[(count, splits)](*given, chosen, scores.stride(0), chosen.stride(0), splits, top_k, num_warps=8,
                                    **options, **limit)


def check_choice(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts,
                 chosen: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int, int]:
    """Check the arguments, and return (token rows, positions that the page table has room for, top-k)."""
    name, device, integers = "choose_positions", q.device, (torch.int32, torch.int64)
    require_tensor(name, "q", q, (None, None, None), device, FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    require_tensor(name, "weights", weights, (num_tokens, num_heads), device, FLOATS)
    stored = q.dtype if scales is None else torch.float8_e4m3fn
    require_tensor(name, "keys", keys, (None, None, head_dim), device, (stored,))
    if scales is not None:
        require_tensor(name, "scales", scales, (*keys.shape[:2], 1), device, (torch.float32,), inner_contiguous=2)
    require_tensor(name, "page_table", contexts.page_table, (None, None), device, integers)
    for argument in ("request_of", "first", "stop"):
        require_tensor(name, argument, getattr(contexts, argument), (num_tokens,), device, integers)
    require_tensor(name, "chosen", chosen, (num_tokens, None), device, integers)
    page_tokens, top_k = keys.shape[1], chosen.shape[1]
    require(page_tokens & (page_tokens - 1) == 0, name, "keys", f"has {page_tokens} tokens per page, expected a power"
            " of two")
    num_keys = contexts.page_table.shape[1] * page_tokens
    require(top_k <= num_keys < MAX_POSITIONS, name, "chosen",
            f"has room for {top_k} of {num_keys} positions, expected at most as many, and fewer than {MAX_POSITIONS}")
    return num_tokens, num_keys, top_k
