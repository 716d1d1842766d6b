"""What a step's batch promises its consumers, for any mix of padded, scheduled and live; and padding that no row of
the attention can see."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.groups import CacheLayout, Group, LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.core import NULL_PAGE, NULL_ROW, Limits, PageWrite, ScheduledBatch
from outrider.mixers.batch import BatchView, ExactQueries, check_rows
from outrider.mixers.paged.backend import AttentionLayer, KeyValueCache
from outrider.mixers.paged.torch_backend import TorchBackend
from outrider.mixers.pool import DevicePool
from outrider.runner.batch import EagerShape, Inputs, PaddedSize, build_inputs, pack_eager
from outrider.runner.row_state import RowState
from tests.unit.made_requests import made_admission

CPU = torch.device("cpu")
LIMITS = Limits(max_requests=8, max_batched_tokens=64, max_len=64, max_drafts=3, vocab_size=100)
HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 8, 12
LAYOUT: CacheLayout = plan_groups([
    LayerCache(0, FullSpec(KV_HEADS, DIM, 8)), LayerCache(1, SlidingSpec(KV_HEADS, DIM, 8, WINDOW)),
])
LAYERS = [
    AttentionLayer(0, HEADS, KV_HEADS, DIM, DIM**-0.5),
    AttentionLayer(1, HEADS, KV_HEADS, DIM, DIM**-0.5, window=WINDOW),
]


@dataclass(frozen=True)
class Member:
    """One request of a batch: what the host scheduled, and what the device knows."""

    computed: int
    num_known: int
    num_drafts: int = 0  # scheduled
    live_drafts: int = 0  # there are so many on the device
    is_alive: bool = True
    samples: bool = True


def build(members: list[Member], padded: PaddedSize | None = None) -> tuple[Inputs, RowState]:
    """Rows and pages are dealt backwards, so that neither is what an index would give by accident."""
    state = RowState(LIMITS, LAYOUT.groups, CPU)
    rows = [LIMITS.max_requests - i for i in range(len(members))]
    page = 1
    for row, member in zip(rows, members, strict=True):
        known = member.computed + member.num_known
        tokens = [(row * 7 + i) % LIMITS.vocab_size for i in range(known)]
        state.admit([made_admission(row, tokens, LIMITS.max_len, prompt_len=1, computed=member.computed)])
        state.alive[row] = member.is_alive
        state.drafts[row] = torch.arange(LIMITS.max_drafts) + 50
        state.num_drafts[row] = member.live_drafts
        for group in LAYOUT.groups:
            columns = state.page_tables[group.index].shape[1]
            state.write_pages([PageWrite(group.index, row, 0, list(range(page + columns - 1, page - 1, -1)))])
            page += columns
    batch = ScheduledBatch(
        step=0, request_ids=list(range(len(members))), epochs=[0] * len(members), rows=rows,
        num_known=[m.num_known for m in members], num_drafts=[m.num_drafts for m in members],
        samples=[m.samples for m in members], bounds=[m.computed + m.num_known + m.num_drafts for m in members],
    )
    shape, ints = pack_eager(batch, padded or PaddedSize(batch.num_requests, batch.num_tokens))
    return build_inputs(shape, torch.tensor(ints), state, LAYOUT.groups, LIMITS.max_len), state


def random_members(draw: random.Random, count: int) -> list[Member]:
    members = []
    for _ in range(count):
        samples = draw.random() < 0.8
        num_drafts = draw.randint(0, LIMITS.max_drafts) if samples else 0
        num_known = 1 if num_drafts else draw.randint(1, 5)
        live_drafts = draw.randint(0, LIMITS.max_drafts)
        members.append(
            Member(draw.randint(0, 40), num_known, num_drafts, live_drafts, draw.random() < 0.85, samples)
        )
    return members


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 9), st.randoms(use_true_random=False))
def test_a_batch_keeps_its_promises(count: int, extra_requests: int, extra_tokens: int, draw: random.Random) -> None:
    members = random_members(draw, count)
    num_tokens = sum(m.num_known + m.num_drafts for m in members)
    inputs, _ = build(members, PaddedSize(count + extra_requests, num_tokens + extra_tokens))
    padded, unpadded = inputs.batch.padded, inputs.batch.unpadded
    assert (padded.num_requests, padded.num_tokens) == (count + extra_requests, num_tokens + extra_tokens)
    assert (unpadded.num_requests, unpadded.num_tokens) == (count, num_tokens)
    for view in (padded, unpadded):
        assert_view(view, members)
        for wide, narrow in ((view.lengths, view.lengths_int32), (view.live, view.live_int32),
                             (view.query_starts, view.query_starts_int32)):
            assert narrow.dtype == torch.int32 and torch.equal(narrow, wide.int())
    assert isinstance(inputs.shape, EagerShape)
    assert sum(inputs.shape.queries.lens) == inputs.shape.scheduled_tokens == num_tokens
    assert sum(inputs.shape.logit_counts) == inputs.shape.logit_rows
    assert_padding(padded, count, num_tokens)
    assert_one_writer_per_slot(padded)


def exact_lens(view: BatchView) -> tuple[int, ...]:
    assert isinstance(view.queries, ExactQueries)
    return view.queries.lens


def assert_view(view: BatchView, members: list[Member]) -> None:
    starts = view.query_starts.tolist()
    assert starts == sorted(starts) and starts[0] == 0
    for index, member in enumerate(members):
        own = slice(starts[index], starts[index + 1])
        scheduled = member.num_known + member.num_drafts
        assert own.stop - own.start == scheduled == exact_lens(view)[index]
        drafts = min(member.num_drafts, member.live_drafts) if member.samples else 0
        live = member.num_known + drafts if member.is_alive else 0
        length = member.computed + live if live else 0
        assert (view.live[index], view.lengths[index]) == (live, length)
        assert view.request_of[own].tolist() == [index] * scheduled
        if live:
            assert view.positions[own][live - 1] == length - 1, "the last live query is at length - 1"
            assert view.positions[own][:live].tolist() == list(range(member.computed, length))
        for group in LAYOUT.groups:
            slots = view.slots(group)[own]
            assert (slots[:live] >= group.page_tokens).all(), "a live token writes, and not to the null page"
            assert (slots[live:] == -1).all(), "a dead token has no slot"
        assert (view.positions[own] < LIMITS.max_len).all()
    for group in LAYOUT.groups:
        check_rows(view, group)


def assert_padding(view: BatchView, count: int, num_tokens: int) -> None:
    assert (view.rows[count:] == NULL_ROW).all() and (view.lengths[count:] == 0).all()
    assert (view.live[count:] == 0).all() and all(n == 0 for n in exact_lens(view)[count:])
    assert (view.query_starts[count:] == num_tokens).all()
    for group in LAYOUT.groups:
        assert (view.page_table(group)[count:] == NULL_PAGE).all()
        assert (view.slots(group)[num_tokens:] == -1).all()


def assert_one_writer_per_slot(view: BatchView) -> None:
    for group in LAYOUT.groups:
        slots = [slot for slot in view.slots(group).tolist() if slot >= 0]
        assert len(slots) == len(set(slots))


def attention(inputs: Inputs, view: BatchView, layer: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the cache afterwards. Token rows that are not live hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    pool = DevicePool(LAYOUT, 100, torch.float64, CPU)
    pool.data.normal_(generator=generator)
    pool.data[NULL_PAGE] = 0
    cache = KeyValueCache(**pool.layer(layer))
    total = inputs.batch.padded.num_tokens
    sizes = [(total, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    is_live = inputs.batch.padded.slots(LAYOUT.groups[0]) >= 0
    for tensor in (q, k, v):
        tensor[~is_live] = torch.nan
    group = LAYOUT.groups_of(layer)[0]
    backend = TorchBackend()
    plan = backend.plan(view, group)
    own = slice(0, view.num_tokens)
    return backend.run(LAYERS[layer], cache, q[own], k[own], v[own], plan), pool.data


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "sliding"])
@pytest.mark.parametrize("count", range(1, 9))
def test_padding_is_invisible_bit_for_bit(count: int, layer: int) -> None:
    """Every partial fill of a batch padded to 8 requests, with dead tokens and ended requests inside."""
    members = random_members(random.Random(count), count)
    num_tokens = sum(m.num_known + m.num_drafts for m in members)
    inputs, _ = build(members, PaddedSize(8, num_tokens + 5))
    out, cache = attention(inputs, inputs.batch.unpadded, layer)
    padded_out, padded_cache = attention(inputs, inputs.batch.padded, layer)
    live = inputs.batch.unpadded.slots(LAYOUT.groups[0]) >= 0
    assert live.any() and torch.equal(padded_out[:num_tokens][live], out[live])
    assert torch.equal(padded_cache, cache)
    assert out[live].isfinite().all() and cache.isfinite().all(), "what is dead was neither read nor written"


def test_dead_tokens_leave_their_neighbours_alone() -> None:
    """The same live tokens with and without dead ones between them."""
    few = [Member(9, 1, 1, 1), Member(20, 1, 2, 2), Member(3, 4)]
    many = [Member(9, 1, 3, 1), Member(20, 1, 3, 2), Member(3, 4)]
    inputs, _ = build(few)
    crowded, _ = build(many)
    a, b = inputs.batch.padded, crowded.batch.padded
    live = b.slots(LAYOUT.groups[0]) >= 0
    assert live.sum() == a.num_tokens < b.num_tokens and not live[3] and live[4], "dead tokens in the middle"
    for name in ("token_ids", "positions", "request_of"):
        assert torch.equal(getattr(b, name)[live], getattr(a, name))
    for group in LAYOUT.groups:
        assert torch.equal(b.slots(group)[live], a.slots(group))
    assert torch.equal(b.lengths, a.lengths)


def mismatched(view: BatchView) -> dict[str, BatchView]:
    """Views whose tensors were cut apart, as when padded tables meet scheduled lengths."""
    return {
        "page table": replace(view, page_tables=tuple(table[:-1] for table in view.page_tables)),
        "lengths": replace(view, lengths=view.lengths[:-1]),
        "query starts": replace(view, query_starts=view.query_starts[:-1]),
        "live": replace(view, live=view.live[:-1]),
        "slots": replace(view, token_slots=tuple(slots[:-1] for slots in view.token_slots)),
        "positions": replace(view, positions=view.positions[:-1]),
        "tokens": replace(view, token_ids=view.token_ids[:-1]),
    }


@pytest.mark.parametrize("what", ["page table", "lengths", "query starts", "live", "slots", "positions", "tokens"])
@pytest.mark.parametrize("group", LAYOUT.groups, ids=["full", "sliding"])
def test_rows_that_disagree_are_refused(what: str, group: Group) -> None:
    inputs, _ = build([Member(5, 1), Member(9, 2)], PaddedSize(4, 8))
    with pytest.raises(ValueError, match=f"the same number of .*{what}"):
        TorchBackend().plan(mismatched(inputs.batch.padded)[what], group)


def test_a_padded_size_below_the_scheduled_is_refused() -> None:
    for size in (PaddedSize(1, 8), PaddedSize(2, 2)):
        with pytest.raises(ValueError, match="a batch was padded to"):
            build([Member(5, 1), Member(9, 2)], size)
