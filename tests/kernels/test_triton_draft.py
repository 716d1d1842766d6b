"""The kernels of a proposal's bookkeeping against the torch code that they stand for, integer for integer: requests
that compute anything or nothing, gaps, rows that do not guess, no room at max_len, padding, groups; and engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the triton package")

from outrider.cache.groups import (
    LayerCache,
    plan_groups,
)
from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.core import Axis, Limits
from outrider.core.params import SamplingParams
from outrider.drafters.base import Step
from outrider.drafters.batches import DraftingBatches, committed_requests, drafting_rows
from outrider.drafters.draw import draw_drafts
from outrider.kernels import cpu as native
from outrider.kernels import gpu, ops
from outrider.kernels.drafting import (
    AdmittedRows,
    CommittedRequests,
    DrafterCacheState,
    DraftingRows,
    DraftPass,
    DraftPasses,
)
from outrider.kernels.gpu.drafts import passes as kernels
from outrider.mixers.batch import AllKeys, BatchView, ExactQueries, ForwardBatch, KeysFrom, LengthBound
from outrider.mixers.paged.triton_backend import TritonBackend
from tests.drafters.checkpoints import make_drafter
from tests.drafters.rig import DraftRig
from tests.drafters.trained import trained_asks, trained_rig
from tests.engine.harness import Ask, greedy, prompt_of, tiny_model, tokens_of

MAX_LEN = 80
LIMITS = Limits(max_requests=8, max_batched_tokens=64, max_len=MAX_LEN, max_drafts=7, vocab_size=50)
LAYERS = [LayerCache(0, FullSpec(2, 8, 8)), LayerCache(1, SlidingSpec(2, 8, 8, 24)), LayerCache(2, FullSpec(2, 16, 8))]
GROUPS = plan_groups(LAYERS).groups
PAGE_TOKENS = tuple(group.page_tokens for group in GROUPS)
assert len(set(PAGE_TOKENS)) > 1


KINDS = ("reference", "triton")


def using(kind: str) -> AbstractContextManager[None]:
    """Proposals do their bookkeeping in torch, or with kernels."""
    return ops.using(kind, ops.plan_draft_passes, ops.plan_reading_pass, ops.plan_block_passes, ops.plan_first_slots,
                     ops.forget_pages, draw_drafts)


@dataclass(frozen=True)
class Member:
    """One request of a committed step."""

    before: int
    scheduled: int
    computed: int  # of the scheduled ones
    waiting: int  # known tokens that are not computed, but for the first
    goes_on: bool
    gap: int  # slots missing since the last fill; below 0 there are more than needed
    valid_from: int


@st.composite
def member(draw: st.DrawFn) -> Member:
    scheduled = draw(st.integers(1, 40))
    computed = draw(st.one_of(st.just(scheduled), st.integers(0, scheduled)))
    # At its longest a request has max_len known tokens, the last one not computed.
    before = draw(st.one_of(st.integers(0, MAX_LEN - 1 - computed), st.just(MAX_LEN - 1 - computed)))
    waiting = draw(st.integers(0, min(3, MAX_LEN - 1 - before - computed)))
    return Member(before, scheduled, computed, waiting, waiting == 0 and draw(st.integers(0, 3)) > 0,
                  draw(st.integers(-1, 2)), draw(st.integers(0, before + 1)))


def make_step(members: list[Member], spare: tuple[int, int], most: int, seed: int, device: torch.device,
              max_len: int = MAX_LEN) -> tuple[Step, DrafterCacheState]:
    """Padded by `spare` requests and tokens. What is not defined holds anything that is in range, the null row too."""
    generator = torch.Generator().manual_seed(seed)
    limits = replace(LIMITS, max_len=max_len, max_requests=max(LIMITS.max_requests, len(members)))
    num_rows, requests = limits.extent(Axis.ROWS), len(members) + spare[0]

    def some(end: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=generator, dtype=dtype).to(device)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    rows = [num_rows - 1 - i for i in range(len(members))]
    tokens, known = some(50, num_rows, max_len), some(max_len, num_rows)
    filled, valid_from = some(max_len, num_rows), some(max_len, num_rows)
    for row, one in zip(rows, members, strict=True):
        known[row] = one.before + one.computed + 1 + one.waiting
        filled[row], valid_from[row] = one.before + 1 - one.gap, one.valid_from
    lens = [one.scheduled for one in members] + [0] * spare[0]
    starts = [sum(lens[:i]) for i in range(requests + 1)]
    request_of = [i for i, n in enumerate(lens) for _ in range(n)] + [requests - 1] * spare[1]
    # A page has one owner: groups and requests have their own.
    widths = [group.kind.capacity(limits).table_width for group in GROUPS]
    pages = torch.randperm(requests * sum(widths), generator=generator).to(torch.int32).add_(1).to(device)
    tables = [part.view(requests, -1) for part in pages.split([requests * width for width in widths])]
    no_count, count = [0] * spare[0], len(request_of)
    before = ints([one.before for one in members] + [3] * spare[0])
    computed = ints([one.computed for one in members] + no_count)
    view = BatchView(
        num_requests=requests, num_tokens=count, queries=ExactQueries(tuple(lens)), max_length=LengthBound(max_len),
        rows=ints(rows + no_count), query_starts=ints(starts), lengths=before + computed, live=computed,
        query_starts_int32=ints(starts).int(), lengths_int32=(before + computed).int(), live_int32=computed.int(),
        token_ids=some(50, count), positions=some(max_len, count), request_of=ints(request_of),
        page_tables=tuple(tables), token_slots=tuple(some(99, count) for _ in GROUPS),
    )
    goes_on = torch.tensor([m.goes_on for m in members] + [False] * spare[0], device=device)
    temperature = some(3, num_rows).float()
    sampling: Any = SimpleNamespace(seed=some(2**62, num_rows), sample_index=some(9, num_rows), temperature=temperature)
    nothing: Any = None
    step = Step(ForwardBatch(view, view), nothing, nothing, before, computed, goes_on, tokens, known, sampling, False,
                most, nothing)
    page_valid = some(2, len(pages) + 1, 5).bool()[:, 3]  # a part of each page, with other bytes between
    own = DrafterCacheState(PAGE_TOKENS, seed % len(GROUPS), seed % 2, max_len, valid_from, filled, page_valid)
    return step, own


def assert_equal(actual: Any, wanted: Any, name: str = "") -> None:
    """Tensors, and whatever is built from them, by value and dtype."""
    if isinstance(wanted, torch.Tensor):
        assert actual.dtype == wanted.dtype and torch.equal(actual, wanted), f"{name}: {actual} for {wanted}"
    elif is_dataclass(wanted):
        for field in fields(wanted):
            assert_equal(getattr(actual, field.name), getattr(wanted, field.name), f"{name}.{field.name}")
    elif isinstance(wanted, tuple | list):
        assert len(actual) == len(wanted)
        for index, (one, other) in enumerate(zip(actual, wanted, strict=True)):
            assert_equal(one, other, f"{name}[{index}]")
    else:
        assert actual == wanted, name


def assert_copies(rows: DraftPass) -> None:
    for wide, narrow in ((rows.lengths, rows.lengths_int32), (rows.live, rows.live_int32)):
        assert narrow.dtype == torch.int32 and torch.equal(narrow, wide.int())


def of_step(step: Step) -> tuple[CommittedRequests, DraftingRows, tuple[torch.Tensor, ...]]:
    return committed_requests(step), drafting_rows(step), step.batch.padded.page_tables


def assert_native_as_torch(step: Step, own: DrafterCacheState) -> DraftPasses:
    """As `assert_as_torch`, of the native code."""
    requests, rows, tables = of_step(step)
    found, owners = [], []
    for kind in ("native", "reference"):
        filled, cold = copy.deepcopy(own), copy.deepcopy(own)
        with using(kind):
            chosen = ops.plan_draft_passes.choose(requests, rows, tables, filled, num_wanted=step.num_wanted)
            assert (chosen is ops.plan_draft_passes.reference) == (kind == "reference")
            found.append(ops.plan_draft_passes(requests, rows, tables, filled, num_wanted=step.num_wanted))
            ops.forget_pages(requests, tables, cold)
        for state in (filled, cold):
            state.page_valid[0] = False
        owners.append((filled, cold))
    assert_equal(found[0], found[1], "passes")
    assert_equal(owners[0], owners[1], "filled")
    return found[0]


def assert_as_torch(step: Step, own: DrafterCacheState) -> DraftPasses:
    """Passes, rows and pages, of a proposal and of a cold step; the null page may be anything."""
    own_of = {name: copy.deepcopy(own) for name in ("torch", "kernels", "cold torch", "cold kernels", "block torch",
                                                    "block kernels")}
    requests, rows, tables = of_step(step)
    options: dict[str, Any] = {"num_wanted": step.num_wanted, "max_len": own.max_len, "behind": 1 + step.num_wanted % 2}
    found = {}
    for name, kind in (("torch", "reference"), ("kernels", "triton")):
        with using(kind):
            found[name] = (ops.plan_draft_passes(requests, rows, tables, own_of[name], num_wanted=step.num_wanted),
                           ops.plan_reading_pass(requests, rows, **options),
                           ops.plan_block_passes(requests, rows, tables, own_of[f"block {name}"],
                                                 num_wanted=step.num_wanted,
                                                 num_rows=step.num_wanted + own.max_len % 2))
            ops.forget_pages(requests, tables, own_of[f"cold {name}"])
    assert_equal(found["kernels"], found["torch"], "passes, reading pass and block passes")
    made, reading, blocks = found["kernels"]
    for one_pass in (made.first, *made.further, reading.only, blocks.context):
        assert_copies(one_pass)
    assert torch.equal(made.key_starts_int32, made.key_starts.int())
    for prefix in ("", "cold ", "block "):
        one, other = own_of[f"{prefix}kernels"], own_of[f"{prefix}torch"]
        for state in (one, other):
            state.page_valid[0] = False
        assert_equal(one, other, f"{prefix}filled")
    return made


@settings(max_examples=40)
@given(st.lists(member(), min_size=1, max_size=4), st.tuples(st.integers(0, 3), st.integers(0, 5)), st.integers(1, 7),
       st.integers(0, 2**20), st.one_of(st.just(MAX_LEN), st.integers(1, MAX_LEN)))
def test_kernels_equal_the_torch_code(device: torch.device, members: list[Member], spare: tuple[int, int], most: int,
                                      seed: int, own_len: int) -> None:
    """own_len: positions of the drafter, which may be fewer than the rows have."""
    step, own = make_step(members, spare, most, seed, device)
    made = assert_as_torch(step, replace(own, max_len=own_len))
    positions = torch.cat([made.first.positions, *(one.positions for one in made.further)])
    assert int(positions.max()) < own_len and int(made.first.lengths.max()) <= own_len


@pytest.mark.skipif(not native.available(), reason="no native kernels")
@settings(max_examples=40)
@given(st.lists(member(), min_size=1, max_size=4), st.tuples(st.integers(0, 3), st.integers(0, 5)), st.integers(1, 7),
       st.integers(0, 2**20), st.one_of(st.just(MAX_LEN), st.integers(1, MAX_LEN)))
def test_native_code_equals_the_torch_code(members: list[Member], spare: tuple[int, int], most: int, seed: int,
                                           own_len: int) -> None:
    step, own = make_step(members, spare, most, seed, torch.device("cpu"))
    made = assert_native_as_torch(step, replace(own, max_len=own_len))
    assert int(made.first.positions.max()) < own_len


@pytest.mark.skipif(not native.available(), reason="no native kernels")
def test_native_code_names_rows_and_pages_that_are_not_there() -> None:
    step, own = make_step([Member(14, 3, 3, 0, True, 0, 1)], (0, 0), 2, 7, torch.device("cpu"))
    requests, rows, tables = of_step(step)
    cases = (requests._replace(rows=requests.rows + len(own.filled)), tables), (requests, tuple(x + 99 for x in tables))
    for given_requests, given_tables in cases:
        with using("native"), pytest.raises(IndexError, match="a row, a request or a page is out of range"):
            ops.plan_draft_passes(given_requests, rows, given_tables, own, num_wanted=2)


def test_the_steps_reach_every_case(device: torch.device) -> None:
    """Or the test above would compare little."""
    members = [
        Member(14, 3, 3, 0, True, 0, 1),  # ends the first page, where slot 0 does not exist
        Member(20, 20, 20, 0, True, 1, 5),  # ends some, after a gap
        Member(70, 9, 6, 0, True, 0, 2),  # room for three drafts
        Member(75, 4, 4, 0, True, 0, 2),  # room for none
        Member(3, 4, 0, 1, False, 2, 2),  # computed nothing
        Member(30, 8, 8, 2, False, 0, 31),  # a chunk of a prompt
    ]
    step, own = make_step(members, (2, 3), 5, 7, device)
    if native.available():
        assert_native_as_torch(*make_step(members, (2, 3), 5, 7, torch.device("cpu")))
    made, rows = assert_as_torch(step, own), step.batch.padded.rows
    counts = made.keys.counts.tolist()
    assert counts[:4] == [5, 5, 3, 0]
    live = torch.stack([rows.live for rows in made.further], dim=1).sum(dim=1)
    assert live.tolist() == [4, 4, 3, 0, 0, 0, 0, 0], "passes, which draft from a draft each"
    starts = made.key_starts
    assert own.first_position == 1 and starts[:2].tolist() == [1, 21]
    assert int(starts[4]) == int(own.valid_from[rows[4]]), "only what fills meets a gap"
    assert int((made.tail_page > 0).sum()) == 2
    assert made.first.lengths.tolist()[4:] == [0, 39, 0, 0]
    assert all(bool((slots[made.tokens.shape[0] - 3 :] == -1).all()) for slots in made.first.slots), "padded tokens"


def test_more_tokens_and_pages_than_are_taken_at_a_time(device: torch.device) -> None:
    members = [Member(before, count, count - 1, 0, True, 2, 9) for before, count in ((5, 600), (90, 5000), (0, 2))]
    made = assert_as_torch(*make_step(members, (1, 300), 3, 2, device, max_len=5200))
    assert int((made.tail_page > 0).sum()) > 40


def test_padded_requests_leave_the_null_row_and_page_alone(device: torch.device) -> None:
    step, own = make_step([Member(4, 20, 20, 0, True, 1, 0)], (3, 4), 2, 5, device)
    before = copy.deepcopy(own)
    requests, rows, tables = of_step(step)
    with using("triton"):
        ops.plan_draft_passes(requests, rows, tables, own, num_wanted=step.num_wanted)
        ops.forget_pages(requests, tables, own)
    for name in ("valid_from", "filled", "page_valid"):
        assert getattr(own, name)[0] == getattr(before, name)[0], name
    assert not torch.equal(own.filled, before.filled)


def test_views_of_passes_have_int32_copies_of_their_own(device: torch.device) -> None:
    """Attention over a pass casts nothing, and no pass meets the copy of another one's tensor."""
    step, own = make_step([Member(4, 3, 3, 0, True, 0, 0)] * 2, (1, 1), 3, 5, device)
    batches, (requests, rows, tables) = DraftingBatches(GROUPS, LIMITS, device), of_step(step)
    with using("triton"):
        passes = ops.plan_draft_passes(requests, rows, tables, own, num_wanted=step.num_wanted)
        reading = ops.plan_reading_pass(requests, rows, num_wanted=step.num_wanted, max_len=MAX_LEN, behind=1)
    first, read = batches.first(step, passes), batches.reading(step, reading)
    second = batches.further(step, passes, 1, passes.keys.last)
    for view in (first, second, read):
        pairs = [(view.lengths, view.lengths_int32), (view.live, view.live_int32),
                 (view.query_starts, view.query_starts_int32)]
        if isinstance(view.visible, KeysFrom):
            pairs.append((view.visible.starts, view.visible.starts_int32))
        for wide, narrow in pairs:
            assert narrow.dtype == torch.int32 and torch.equal(narrow, wide.int())
        plan = TritonBackend().plan(view, GROUPS[0])
        assert plan.decode_live is view.live_int32
    assert isinstance(first.visible, KeysFrom) and isinstance(read.visible, AllKeys)
    assert second.lengths_int32 is passes.further[0].lengths_int32 and read.lengths_int32 is reading.only.lengths_int32


@pytest.mark.parametrize("lens, bound", [((1, 1), 1), ((2, 1), 4), ((3, 3), 4), ((2, 30), 4), ((1, 30), 1), ((4, 2), 4),
                                         ((30, 31), 0)])
def test_eager_steps_use_the_decode_tiles_of_captured_steps(device: torch.device, lens: tuple[int, int],
                                                            bound: int) -> None:
    """Captured steps bound the decode kernel's queries by 1 or by all drafts. A tile of its own for each number of
    drafts would be a kernel to compile while requests wait."""
    members = [Member(4, count, count, 0, True, 0, 0) for count in lens]
    step, _ = make_step(members, (0, 0), 3, 5, device)
    plan = TritonBackend(decode_kernel_max_query=4).plan(step.batch.padded, GROUPS[0])
    assert plan.decode_max_query == bound


@given(st.integers(0, 2**31), st.integers(1, 9), st.booleans(), st.integers(0, 2), st.booleans())
def test_first_slots_equal_the_torch_code(device: torch.device, seed: int, count: int, needs_tail: bool,
                                          num_chained: int, is_filled: bool) -> None:
    """Hits that end at pages and within them, at 0 and past the drafter's length, with evicted and unfilled pages."""
    generator, num_pages, num_rows = torch.Generator().manual_seed(seed), 40, 12

    def some(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device, dtype)

    valid = torch.zeros(num_pages, 3, dtype=torch.bool, device=device)
    valid[:, 1] = some(4, num_pages) > 0
    own = DrafterCacheState(PAGE_TOKENS, 1, 1, MAX_LEN - 9, some(9, num_rows), some(9, num_rows), valid[:, 1])
    tables = tuple(some(num_pages, count, -(-MAX_LEN // size), dtype=torch.int32) for size in PAGE_TOKENS)
    begin = torch.where(some(2, count) > 0, some(MAX_LEN, count), some(MAX_LEN // 16, count) * 16)
    needed = torch.stack([torch.minimum(some(3, count), begin // size) for size in PAGE_TOKENS])
    rows = 1 + torch.randperm(num_rows - 1, generator=generator)[:count].to(device)
    admitted = AdmittedRows(rows, begin, some(5, count).clamp_max(1), needed)
    found = {}
    for kind in KINDS:
        state = copy.deepcopy(own)
        with using(kind):
            planned = ops.plan_first_slots(admitted, tables, state, needs_tail=needs_tail, num_chained=num_chained,
                                           is_filled=is_filled)
        found[kind] = planned, state
    assert_equal(*(found[kind] for kind in KINDS))


SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 17, "max_num_seqs": 3, "max_model_len": 64, "overlap": True,
                            "pad_requests": (4,), "pad_tokens": (6, 24)}


@pytest.mark.parametrize(("kind", "family"), [("eagle3", "gemma3"), ("eagle", "llama"), ("draft_model", "gemma3")])
def test_an_engine_proposes_the_same_with_kernels(kind: str, family: str, tmp_path: Path) -> None:
    """Cold steps, hits, chunks, padding and steps in flight, until max_model_len. On the CPU: under the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the engine under test runs on the CPU")
    drafter, shared = make_drafter(kind, family, tmp_path), prompt_of(0, 32)
    asks = [Ask([*shared, *prompt_of(1, 9)], greedy(9)), Ask(prompt_of(2, 55), greedy(None)),
            Ask([*shared, *prompt_of(3, 2)], SamplingParams(temperature=1.0, seed=3, max_tokens=8))]
    found = []
    for kernel_kind in KINDS:
        with using(kernel_kind), DraftRig(tiny_model(family), speculative_config=drafter.speculative(3),
                                     propose_at=lambda step: 3 if step % 4 else 0, **SETTINGS) as rig:
            outputs = [rig.run(asks), rig.run(asks)]
            assert rig.num_cold > 1 and rig.scheduler.cache.stats.hit_tokens > 0
            own = rig.step.drafter._state  # type: ignore[union-attr]
            state = (own.valid_from, own.filled, own.page_valid[1:])
            found.append((rig.proposals, [tokens_of(part) for part in outputs], [part.tolist() for part in state]))
    assert found[0] == found[1]
    assert any(len(proposal.drafts) < 3 for proposal in found[0][0]), "room ran out"


def test_an_assistant_proposes_the_same_with_kernels() -> None:
    if torch.cuda.is_available():
        pytest.skip("the engine under test runs on the CPU")
    found = []
    for kind in KINDS:
        with using(kind), trained_rig(pad_requests=(4,), pad_tokens=(30,), max_num_seqs=3) as rig:
            rig.run(trained_asks(3, (9, 20), max_tokens=10))
            found.append(rig.proposals)
    assert found[0] and found[0] == found[1]


@contextmanager
def fused(module: ModuleType | None) -> Iterator[None]:
    """Heads take in and hand on by kernels, norms too, as on a card; or by none."""
    heads = ops.join_embedding, ops.take_rows, ops.rms_norm, ops.add_rms_norm, ops.norm_add_norm, ops.silu_mul
    with ops.using("triton", *heads) if module is not None else nullcontext():
        yield


@pytest.mark.parametrize("kind", ["eagle3", "eagle3_speculators", "mtp"])
def test_float32_drafts_are_the_same_with_kernels(kind: str, tmp_path: Path) -> None:
    """Greedy and sampled, with a reduced vocabulary and without."""
    if torch.cuda.is_available():
        pytest.skip("the engine under test runs on the CPU")
    drafter = make_drafter(kind, "llama", tmp_path)
    sampled = SamplingParams(temperature=0.7, seed=3, max_tokens=6)
    asks = [Ask(prompt_of(1, 9), greedy(5)), Ask(prompt_of(2, 7), sampled)]
    found = []
    for kernel_kind in KINDS:
        module = gpu if kernel_kind == "triton" else None
        with (using(kernel_kind), fused(module),
              mock.patch.object(kernels, "sample_logits", wraps=kernels.sample_logits) as called,
              DraftRig(tiny_model("llama", torch.float32), speculative_config=drafter.speculative(2)) as rig):
            rig.run(asks)
            found.append(rig.proposals)
            assert called.called == (kernel_kind == "triton")
    assert found[0] == found[1]


@pytest.mark.parametrize(("gained", "scale", "hidden_first"), [(False, None, False), (False, 7.5, False),
                                                               (True, None, True), (True, 7.5, False)])
def test_joined_inputs_equal_the_steps_one_by_one(device: torch.device, dtype: torch.dtype, gained: bool,
                                                  scale: float | None, hidden_first: bool) -> None:
    """With strided hidden states and a width that is no power of two."""
    generator = torch.Generator().manual_seed(4)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    tokens, table, hidden = torch.tensor([3, 0, 9, 9, 1], device=device), some(10, 48), some(5, 96)[:, 48:]
    options: dict[str, Any] = {"scale": scale, "hidden_first": hidden_first, "eps": 1e-5}
    options["gains"] = (some(48).float(), some(48)) if gained else None
    options["positions"] = torch.tensor([0, 2, 1, 5, 9], device=device) if hidden_first else None
    with ops.using("reference", ops.join_embedding):
        wanted, wanted_part = ops.join_embedding(tokens, table, hidden, **options)
    with ops.using("triton"):
        made, part = ops.join_embedding(tokens, table, hidden, **options)
    torch.testing.assert_close(made, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert gained or torch.equal(made, wanted)
    is_shown = [False, True, False, True, True] if hidden_first else [True] * 5
    assert (made[:, 48:].abs().sum(1) > 0).tolist() == is_shown
    torch.testing.assert_close(part, wanted_part, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    empty, _ = gpu.join_embedding(tokens[:0], table, hidden[:0])
    assert empty.shape == (0, 96)


def test_rows_of_two_matrices_are_taken_at_once(device: torch.device, dtype: torch.dtype) -> None:
    first, second = (torch.randn(7, width, device=device).to(dtype) for width in (1100, 40))
    index = torch.tensor([6, 0, 0, 3], device=device)
    with ops.using("triton"):
        one, other = ops.take_rows(first, second[:, 8:], index)
        same, again = ops.take_rows(first, first, index)
    assert torch.equal(one, first[index]) and torch.equal(other, second[index, 8:])
    assert same is again and torch.equal(same, one)


def test_wrappers_of_heads_name_what_is_wrong(device: torch.device) -> None:
    tokens, wide = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, 8, device=device)
    cases: list[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ("tokens", (tokens.int(), wide, wide), {}), ("table", (tokens, wide[:, :4], wide), {}),
        ("table", (tokens, wide.to(torch.bfloat16), wide), {}), ("hidden", (tokens, wide, wide.double()), {}),
        ("gains", (tokens, wide, wide), {"gains": (wide[0], wide[0, :4])}),
    ]
    for argument, tensors, options in cases:
        with pytest.raises(ValueError, match=f"join_embedding: {argument} "):
            gpu.join_embedding(*tensors, **options)
    for argument, first, second, index in (
        ("first", wide.t(), wide, tokens), ("second", wide, wide[:1], tokens), ("index", wide, wide, tokens.int())
    ):
        with pytest.raises(ValueError, match=f"take_rows: {argument} "):
            gpu.take_rows(first, second, index)


def test_wrappers_name_what_is_wrong(device: torch.device) -> None:
    step, own = make_step([Member(4, 3, 3, 0, True, 0, 0)], (0, 0), 2, 0, device)
    requests, rows, tables = of_step(step)
    kernels.plan_draft_passes(requests, rows, tables, own, num_wanted=2)
    cases: list[tuple[str, tuple[Any, ...], int]] = [
        ("requests.goes_on", (requests._replace(goes_on=requests.rows), rows, tables, own), 2),
        ("requests.query_starts", (requests._replace(query_starts=requests.rows), rows, tables, own), 2),
        ("rows.known", (requests, rows._replace(known=rows.known.int()), tables, own), 2),
        ("own.page_valid", (requests, rows, tables, replace(own, page_valid=own.filled)), 2),
        ("own.page_tokens", (requests, rows, tables, replace(own, page_tokens=(16,))), 2),
        ("own.tail_group", (requests, rows, tables, replace(own, tail_group=len(GROUPS))), 2),
        ("tables", (requests, rows, tuple(table[:, :1] for table in tables), own), 2),
        ("max_len", (requests, rows, tables, replace(own, max_len=MAX_LEN + 1)), 2),
        ("num_wanted", (requests, rows, tables, own), 0),
    ]
    for argument, tensors, num_wanted in cases:
        with pytest.raises(ValueError, match=f"plan_draft_passes: {argument} "):
            kernels.plan_draft_passes(*tensors, num_wanted=num_wanted)
