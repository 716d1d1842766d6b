"""The kernels of a step's bookkeeping against the torch code that they stand for, integer for integer: batches with
dead tokens, padding of every kind, ended rows, drafts cut by rows and ends, several groups; and a whole engine."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

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
from outrider.core import Finish, Limits, ScheduledBatch
from outrider.core.draft_confidence import NUM_LEVELS
from outrider.kernels import cpu as native
from outrider.kernels import gpu as kernels
from outrider.kernels import ops
from outrider.kernels.packet import StepPacket, unpack
from outrider.kernels.step import CommittedStep, VerifiedStep
from outrider.mixers.batch import DecodeQueries, LengthBound, MixedQueries
from outrider.runner.batch import (
    CapturedShape,
    Inputs,
    PaddedSize,
    build_inputs,
    pack_captured,
    pack_eager,
)
from outrider.runner.row_state import RowState
from outrider.runner.step import DeviceStep
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

VOCAB = 4  # few, so that drafts agree and stop ids are met
LIMITS = Limits(max_requests=7, max_batched_tokens=64, max_len=80, max_drafts=5, vocab_size=VOCAB, max_stop_ids=3)
LAYERS = [LayerCache(0, FullSpec(2, 8, 8)), LayerCache(1, SlidingSpec(2, 8, 8, 24)), LayerCache(2, FullSpec(2, 16, 8))]
GROUPS = plan_groups(LAYERS).groups
assert len({group.page_tokens for group in GROUPS}) > 1


KINDS = ("reference", "triton")


def using(kind: str) -> AbstractContextManager[None]:
    """Steps do their bookkeeping in torch, or with kernels."""
    return ops.using(kind, ops.prepare_step, ops.commit_step, ops.store_drafts)


@dataclass(frozen=True)
class Member:
    """One request of a batch: what the host scheduled, and what the device knows."""

    computed: int
    num_known: int
    num_drafts: int  # scheduled
    row_drafts: int  # what the row holds
    samples: bool
    alive: bool
    room: int  # known tokens until the end
    stop_ids: tuple[int, ...]


@st.composite
def member(draw: st.DrawFn) -> Member:
    samples = draw(st.integers(0, 4)) > 0
    return Member(
        computed=draw(st.integers(0, 40)), num_known=draw(st.integers(1, 4)),
        num_drafts=draw(st.integers(0, LIMITS.max_drafts)) if samples else 0,
        row_drafts=draw(st.integers(0, LIMITS.max_drafts)), samples=samples, alive=draw(st.integers(0, 5)) > 0,
        room=draw(st.one_of(st.integers(0, 6), st.just(30))),
        stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
    )


@dataclass(frozen=True)
class Spare:
    """How far a batch is padded beyond what is scheduled."""

    requests: int = 0
    tokens: int = 0
    logit_rows: int = 0
    drafts: int = 0


SPARE = st.builds(Spare, st.integers(0, 3), st.integers(0, 5), st.integers(0, 4), st.integers(0, 2))


def make_state(members: list[Member], limits: Limits, seed: int, device: torch.device) -> tuple[RowState, list[int]]:
    """Rows are dealt backwards; whatever a row, or the null row, does not define holds anything that is in range."""
    generator = torch.Generator().manual_seed(seed)

    def some(like: torch.Tensor, end: int) -> torch.Tensor:
        return torch.randint(0, end, like.shape, generator=generator, dtype=like.dtype).to(device)

    state = RowState(limits, GROUPS, device)
    state.tokens, state.drafts = some(state.tokens, VOCAB), some(state.drafts, VOCAB)
    state.known, state.computed = some(state.known, 50), some(state.computed, 50)
    state.num_drafts = some(state.num_drafts, limits.max_drafts + 1)
    state.alive.fill_(True)
    state.page_tables = [some(table, 1000) for table in state.page_tables]
    sampling = state.sampling
    sampling.end_len, sampling.stop_ids = some(sampling.end_len, limits.max_len), some(sampling.stop_ids, VOCAB)
    rows = [limits.max_requests - i for i in range(len(members))]
    for row, one in zip(rows, members, strict=True):
        known = one.computed + one.num_known + (0 if one.samples else 3)
        state.known[row], state.computed[row], state.alive[row] = known, one.computed, one.alive
        state.num_drafts[row] = one.row_drafts
        sampling.end_len[row] = min(known + one.room, limits.max_len)
        sampling.num_stop_ids[row] = len(one.stop_ids)
        sampling.stop_ids[row, : len(one.stop_ids)] = torch.tensor(one.stop_ids, dtype=torch.int64)
    return state, rows


def make_batch(members: list[Member], rows: list[int]) -> ScheduledBatch:
    count = range(len(members))
    return ScheduledBatch(
        step=0, request_ids=list(count), epochs=[0 for _ in count], rows=rows, num_known=[m.num_known for m in members],
        num_drafts=[m.num_drafts for m in members], samples=[m.samples for m in members],
        bounds=[m.computed + m.num_known + m.num_drafts for m in members],
    )


def prepared(members: list[Member], spare: Spare, seed: int, device: torch.device,
             limits: Limits = LIMITS, kinds: tuple[str, str] = KINDS) -> tuple[Inputs, Inputs, RowState]:
    """The inputs by torch and by the kernels, and the row state they were made from."""
    state, rows = make_state(members, limits, seed, device)
    batch = make_batch(members, rows)
    logit_rows = sum(1 + m.num_drafts for m in members if m.samples)
    drafts = min(max(m.num_drafts for m in members) + spare.drafts, limits.max_drafts)
    shape = CapturedShape(
        batch.num_requests + spare.requests, batch.num_tokens + spare.tokens, logit_rows + spare.logit_rows, drafts,
        MixedQueries(1 + drafts), MixedQueries(1), LengthBound(limits.max_len), limits.max_drafts, False,
    )
    ints = pack_captured(batch, shape)
    made = []
    for kind in kinds:
        with using(kind):
            made.append(build_inputs(shape, torch.tensor(ints, device=device), state, GROUPS, limits.max_len))
    return made[0], made[1], state


def assert_equal(actual: Any, wanted: Any, name: str = "") -> None:
    """Tensors, and whatever is built from them, by value and dtype."""
    if isinstance(wanted, torch.Tensor):
        assert actual.dtype == wanted.dtype and torch.equal(actual, wanted), f"{name}: {actual} for {wanted}"
    elif is_dataclass(wanted):
        for field in fields(wanted):
            if field.name != "first_logit":  # undefined where a request has no logit rows
                assert_equal(getattr(actual, field.name), getattr(wanted, field.name), f"{name}.{field.name}")
    elif isinstance(wanted, tuple | list):
        assert len(actual) == len(wanted)
        for index, (one, other) in enumerate(zip(actual, wanted, strict=True)):
            assert_equal(one, other, f"{name}[{index}]")
    else:
        assert actual == wanted, name


def assert_prepared(made: Inputs, wanted: Inputs) -> None:
    assert_equal(made, wanted, "inputs")
    view = made.batch.padded
    for wide, narrow in ((view.query_starts, view.query_starts_int32), (view.lengths, view.lengths_int32),
                         (view.live, view.live_int32)):
        assert narrow.dtype == torch.int32 and torch.equal(narrow, wide.int())
    for request, samples in enumerate(made.samples.tolist()):
        own = (made.logit_rows.request == request) & (made.logit_rows.draft_index == 0)
        for first_logit in (made.first_logit, wanted.first_logit):
            assert not samples or int(first_logit[request]) == own.tolist().index(True)


def commit(inputs: Inputs, state: RowState, tokens: torch.Tensor, bad: torch.Tensor) -> CommittedStep:
    step: Any = SimpleNamespace(state=state)
    return DeviceStep.commit(step, inputs, tokens, bad)


def assert_committed(made: Inputs, wanted: Inputs, state: RowState, seed: int,
                     kinds: tuple[str, str] = KINDS) -> CommittedStep:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(made.logit_rows),), generator=generator)
    # Most logit rows choose their draft, so that runs get long; padded ones choose anything.
    draft = made.logit_rows.draft_index.cpu()
    if made.drafts.shape[1]:
        own = made.drafts.cpu()[made.logit_rows.request.cpu(), draft.clamp_max(made.drafts.shape[1] - 1)]
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.8, own, tokens)
    bad = (torch.rand(tokens.shape, generator=generator) < 0.1).to(state.device)
    states = [copy.deepcopy(state), state]
    found = []
    for own_state, inputs, kind in zip(states, (wanted, made), kinds, strict=True):
        with using(kind):
            found.append(commit(inputs, own_state, tokens.to(state.device), bad))
    assert_equal(found[1], found[0], "committed")
    for name, tensor in vars(states[0]).items():
        if isinstance(tensor, torch.Tensor):
            assert_equal(getattr(state, name), tensor, f"state.{name}")
    return found[1]


@settings(max_examples=25)
@given(st.lists(member(), min_size=1, max_size=4), SPARE, st.integers(0, 2**20))
def test_kernels_equal_the_torch_code(device: torch.device, members: list[Member], spare: Spare, seed: int) -> None:
    wanted, made, state = prepared(members, spare, seed, device)
    assert_prepared(made, wanted)
    assert_committed(made, wanted, state, seed)


@settings(max_examples=50)
@given(st.lists(member(), min_size=1, max_size=4), SPARE, st.integers(0, 2**20))
def test_native_code_equals_the_torch_code(members: list[Member], spare: Spare, seed: int) -> None:
    if not native.available():
        pytest.skip(native.reason())
    kinds, cpu = ("reference", "native"), torch.device("cpu")
    wanted, made, state = prepared(members, spare, seed, cpu, kinds=kinds)
    assert_prepared(made, wanted)
    assert_committed(made, wanted, state, seed, kinds)


def test_native_code_serves_the_engines_rows_and_refuses_rows_out_of_range() -> None:
    if not native.available():
        pytest.skip(native.reason())
    state, rows = make_state([Member(4, 1, 2, 2, True, True, 9, ())], LIMITS, 0, torch.device("cpu"))
    batch = make_batch([Member(4, 1, 2, 2, True, True, 9, ())], rows)
    shape, ints = pack_eager(batch, PaddedSize(batch.num_requests, batch.num_tokens))
    packet = unpack(shape, torch.tensor(ints))
    options: Any = {"max_drafts": shape.max_drafts, "page_tokens": tuple(group.page_tokens for group in GROUPS),
                    "max_len": LIMITS.max_len}
    assert ops.prepare_step.has_kernel(packet, state, **options)
    made = ops.prepare_step(packet, state, **options)
    verified = VerifiedStep(packet.rows, made.num_known, made.num_drafts, made.samples, made.first_logit, made.drafts)
    sampled = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    assert ops.commit_step.has_kernel(*sampled, verified, state)
    far = torch.full_like(packet.rows, LIMITS.max_requests + 1)
    with pytest.raises(IndexError, match="out of range"):
        ops.prepare_step(packet._replace(rows=far), state, **options)
    with pytest.raises(IndexError, match="out of range"):
        ops.commit_step(*sampled, verified._replace(rows=far), state)
    with pytest.raises(IndexError, match="too short"):
        ops.prepare_step(packet, state, **(options | {"page_tokens": (1,) * len(GROUPS)}))


def test_the_batches_reach_every_outcome(device: torch.device) -> None:
    """Or the test above would compare little."""
    outcomes, accepted, cut = set(), set(), False
    for seed in range(12):
        samples, ended = seed % 5 > 0, seed % 7 == 0
        members = [Member(3 + seed, 1 + i % 2, 5 if samples else 0, 5 - i % 2, samples, not ended, 2 + 3 * i,
                          (seed % 4,) if i % 2 else ()) for i in range(6)]
        wanted, made, state = prepared(members, Spare(1, 2, 1, 0), seed, device)
        cut |= bool((made.num_drafts < 4).any() & (made.num_drafts > 0).any())
        done = assert_committed(made, wanted, state, seed).accepted
        outcomes |= set(done.finish.tolist())
        accepted |= set(done.num_accepted.tolist())
    assert outcomes == {Finish.NO, Finish.STOP, Finish.LENGTH, Finish.ERROR} and accepted == set(range(6)) and cut


def test_more_requests_tokens_and_columns_than_a_program_takes(device: torch.device) -> None:
    limits = replace(LIMITS, max_requests=140, max_len=17_000, max_batched_tokens=1024)
    members = [Member(i * 120, 1 + i % 3, 2 * (i % 2), 1 + i % 2, True, i % 11 > 0, 9, (i % 4,)) for i in range(130)]
    wanted, made, state = prepared(members, Spare(3, 7, 5, 1), 1, device, limits)
    assert max(table.shape[1] for table in state.page_tables) > 1024
    assert_prepared(made, wanted)
    assert_committed(made, wanted, state, 1)


def test_without_drafts_there_is_one_column(device: torch.device) -> None:
    members = [Member(i, 1, 0, 0, i > 0, True, 1 + i, ()) for i in range(4)]
    wanted, made, state = prepared(members, Spare(2, 2, 2), 3, device, replace(LIMITS, max_drafts=0))
    assert_prepared(made, wanted)
    assert assert_committed(made, wanted, state, 3).accepted.run.shape == (6, 1)


def test_padded_requests_leave_the_null_row_alone(device: torch.device) -> None:
    _, made, state = prepared([Member(4, 1, 2, 2, True, True, 9, ())], Spare(3, 4, 5, 1), 5, device)
    state.num_drafts[0] = 0  # as every step leaves it
    before = copy.deepcopy(state)
    sampled = torch.ones_like(made.logit_rows.row)
    with using("triton"):
        committed = commit(made, state, sampled, torch.ones_like(sampled, dtype=torch.bool))
    assert not committed.counts[1:].any() and not committed.accepted.run[1:].any()
    for name in ("tokens", "known", "computed", "alive", "drafts", "num_drafts"):
        assert torch.equal(getattr(state, name)[0], getattr(before, name)[0]), name


def test_logit_rows_are_token_rows_where_all_sample_with_one_known_token(device: torch.device) -> None:
    def are_tokens(members: list[Member], extra: int = 0) -> bool:
        batch = make_batch(members, [LIMITS.max_requests - i for i in range(len(members))])
        shape, ints = pack_eager(batch, PaddedSize(batch.num_requests + extra, batch.num_tokens + extra))
        is_same = unpack(shape, torch.tensor(ints)).logit_token.tolist() == list(range(shape.logit_rows))
        assert shape.logit_rows <= shape.tokens and (is_same or not shape.logit_rows_are_tokens)
        return shape.logit_rows_are_tokens

    decoding, drafting = Member(4, 1, 0, 0, True, True, 9, ()), Member(4, 1, 3, 1, True, True, 9, ())
    two_known, chunk = replace(decoding, num_known=2), replace(decoding, samples=False)
    assert are_tokens([decoding] * 3) and are_tokens([decoding, drafting], 2)
    assert not are_tokens([decoding, two_known]) and not are_tokens([decoding, chunk, decoding])
    captured = CapturedShape.decoding(4, 8, 3, window=3, max_len=80)
    assert captured.logit_rows_are_tokens and captured.logit_rows == captured.tokens
    assert captured.queries == DecodeQueries(4)
    assert not CapturedShape.with_prompts(4, 8, 3, window=3, max_len=80).logit_rows_are_tokens


def test_an_engine_gives_the_same_tokens_with_kernels() -> None:
    """Two groups, chunked prompts, drafts, padding and steps in flight. On the CPU: under the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the engine under test runs on the CPU")
    options: dict[str, Any] = {
        "max_num_batched_tokens": 17, "max_num_seqs": 3, "max_model_len": 64, "pad_requests": (4,),
        "pad_tokens": (6, 24), "overlap": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False},
    }
    asks = [Ask([5, 6, 7, 8] * (3 + i) + prompt_of(i, 3), greedy(8, stop_token_ids=[9 + i])) for i in range(4)]
    found = []
    for kind in KINDS:
        with using(kind), Rig(tiny_model("gemma3"), **options) as rig:
            found.append((tokens_of(rig.run(asks)), [result.requests for result in rig.results]))
    assert found[0] == found[1]
    assert any(request.num_drafted for requests in found[0][1] for request in requests), "drafts were checked"


def test_wrappers_name_what_is_wrong(device: torch.device) -> None:
    _, made, state = prepared([Member(4, 1, 2, 2, True, True, 9, ())], Spare(), 0, device)
    view, one = made.batch.padded, made.samples.long()
    logit_rows = made.logit_rows
    packet = StepPacket(view.rows, one, one, one, view.query_starts, view.request_of, view.request_of,
                        logit_rows.request, logit_rows.draft_index, made.logit_token_rows, one, one, one,
                        torch.zeros(made.drafts.shape[1] * NUM_LEVELS, dtype=torch.int64, device=device))
    page_tokens = tuple(group.page_tokens for group in GROUPS)
    options: dict[str, Any] = {"max_drafts": 2, "page_tokens": page_tokens, "max_len": 80}
    kernels.prepare_step(packet, state, **options)
    for argument, value in (("max_drafts", 6), ("page_tokens", (16,)), ("max_len", 81)):
        with pytest.raises(ValueError, match=f"prepare_step: {argument} "):
            kernels.prepare_step(packet, state, **(options | {argument: value}))
    with pytest.raises(ValueError, match="prepare_step: packet.query_starts "):
        kernels.prepare_step(packet._replace(query_starts=view.rows), state, **options)
    batch = VerifiedStep(view.rows, made.num_known, made.num_drafts, made.samples, made.first_logit, made.drafts)
    tokens, bad = torch.zeros_like(made.logit_rows.row), torch.zeros_like(made.logit_rows.row, dtype=torch.bool)
    for argument, call in (
        ("bad", (tokens, tokens, batch)), ("sampled", (tokens.int(), bad, batch)),
        ("batch.samples", (tokens, bad, batch._replace(samples=one))),
    ):
        with pytest.raises(ValueError, match=f"commit_step: {argument} "):
            kernels.commit_step(*call, state)
