"""Token rows shared out among drafts: the torch code against its words, and the kernel against the torch code, integer
for integer, with ended and padded requests, equal gains, fewer drafts than rows, and no sharing at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the triton package")

from outrider.core import ScheduledBatch
from outrider.core.draft_confidence import CHANCE_BITS, MOST_CHANCE, NUM_LEVELS, WEIGHT_BITS, DraftSharing, levels_of
from outrider.core.step_messages import DraftOrders
from outrider.kernels import ops
from outrider.kernels.gpu.drafts.share import share_drafts
from outrider.kernels.packet import StepPacket, unpack
from outrider.runner.batch import CapturedShape, pack_captured
from tests.kernels.compiled import compiling, found_without_interpreter

ONE = 1 << WEIGHT_BITS
LAID_OUT = ("num_drafts", "query_starts", "request_of", "offset", "logit_request", "logit_draft", "logit_token")


@dataclass(frozen=True)
class Member:
    """One request: the most drafts that it may get, those that wait in its row, and how sure their drafter is."""

    most: int
    waiting: int
    levels: int
    weight: int
    alive: bool = True
    room: int = 50


@dataclass(frozen=True)
class Case:
    members: list[Member]
    total: int
    chances: list[int]
    max_drafts: int
    spare_requests: int = 0
    spare_tokens: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    drafts = draw(st.integers(1, 4))
    member = st.builds(Member, st.integers(0, drafts), st.integers(0, drafts), st.integers(-(2**63), 2**63 - 1),
                       st.sampled_from([0, ONE // 2, ONE, 3 * ONE]), st.integers(0, 5).map(bool),
                       st.sampled_from([0, 2, 50]))
    members = draw(st.lists(member, min_size=1, max_size=6))
    few = st.lists(st.integers(0, 1 << CHANCE_BITS), min_size=2, max_size=4)
    chances = draw(st.lists(st.sampled_from(draw(few)), min_size=drafts * NUM_LEVELS, max_size=drafts * NUM_LEVELS))
    return Case(members, draw(st.integers(0, len(members) * drafts)), chances, drafts, draw(st.integers(0, 2)),
                draw(st.integers(0, 3)))


def rows_of(case: Case, device: torch.device) -> Any:
    """Row i + 1 is that of member i; row 0 is the null row."""

    def column(null: int, values: list[int]) -> torch.Tensor:
        return torch.tensor([null, *values], device=device)

    members = case.members
    return SimpleNamespace(
        known=column(9, [7] * len(members)), alive=column(1, [int(own.alive) for own in members]).bool(),
        num_drafts=column(3, [own.waiting for own in members]), levels=column(77, [own.levels for own in members]),
        sampling=SimpleNamespace(end_len=column(40, [8 + own.room for own in members])))


def packet_of(case: Case, device: torch.device) -> StepPacket:
    count = len(case.members)
    rows = list(range(1, count + 1))
    sharing = DraftSharing(case.total, [own.weight for own in case.members], case.chances)
    batch = ScheduledBatch(0, rows, [0] * count, rows, [1] * count, [own.most for own in case.members], [True] * count,
                           [8] * count, drafting=DraftOrders(sharing=sharing if case.total else None))
    tokens = count + (case.total or sum(batch.num_drafts)) + case.spare_tokens
    shape = CapturedShape.decoding(count + case.spare_requests, tokens, case.max_drafts, window=0, max_len=64)
    return unpack(shape, torch.tensor(pack_captured(batch, shape), device=device))


def shared(kind: str, case: Case, device: torch.device) -> StepPacket:
    packet = packet_of(case, device)
    with ops.using(kind, ops.share_drafts):
        ops.share_drafts(packet, rows_of(case, device), max_drafts=case.max_drafts)
    return packet


def told(case: Case) -> list[int]:
    """Drafts of each member, by the words of `share_drafts`."""
    gains = []
    for index, own in enumerate(case.members):
        reached = 1 << 30
        for place, level in enumerate(levels_of(own.levels, min(own.most, own.waiting, own.room) if own.alive else 0)):
            chance = min(case.chances[place * NUM_LEVELS + level] * own.weight >> WEIGHT_BITS,
                         int(MOST_CHANCE * (1 << CHANCE_BITS)))
            reached = reached * chance >> CHANCE_BITS
            gains.append((-reached, index))
    taken = [index for _, index in sorted(gains)[: case.total]]
    return [taken.count(index) for index in range(len(case.members))]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_likeliest_drafts_get_the_rows(case: Case) -> None:
    packet = shared("reference", case, torch.device("cpu"))
    if not case.total:
        for field, wanted in zip(packet, packet_of(case, torch.device("cpu")), strict=True):
            assert torch.equal(field, wanted)
        return
    counts = told(case)
    padded, tokens = counts + [0] * case.spare_requests, packet.request_of.shape[0]
    assert packet.num_drafts.tolist() == padded
    owners = [index for index, count in enumerate(counts) for _ in range(1 + count)]
    offsets = [offset for count in counts for offset in range(1 + count)]
    rest = tokens - len(owners)
    assert packet.request_of.tolist() == packet.logit_request.tolist() == owners + [len(padded) - 1] * rest
    assert packet.offset.tolist() == offsets + [tokens] * rest
    assert packet.logit_draft.tolist() == offsets + [case.max_drafts + 1] * rest
    assert packet.logit_token.tolist() == [*range(len(owners))] + [0] * rest
    ends = torch.tensor([0, *(1 + count for count in counts), *[0] * case.spare_requests]).cumsum(0)
    assert torch.equal(packet.query_starts, ends)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_the_kernel_equals_the_torch_code(device: torch.device, case: Case) -> None:
    found = shared("triton", case, device)
    for name, own, wanted in zip(found._fields, found, shared("reference", case, device), strict=True):
        assert torch.equal(own, wanted), name


def test_the_kernel_refuses_what_is_no_packet(device: torch.device) -> None:
    case = Case([Member(2, 2, 0x33, ONE)] * 2, 2, [1 << CHANCE_BITS] * 2 * NUM_LEVELS, 2)
    packet, rows = packet_of(case, device), rows_of(case, device)
    with pytest.raises(ValueError, match="share_drafts: packet.chances "):
        share_drafts(packet, rows, max_drafts=3)
    with pytest.raises(ValueError, match="share_drafts: packet.weights "):
        share_drafts(packet._replace(weights=packet.weights[:1]), rows, max_drafts=2)
    rows.levels = rows.levels[:1]
    with pytest.raises(ValueError, match=r"share_drafts: rows.levels "):
        share_drafts(packet, rows, max_drafts=2)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile it")
def test_the_compiler_takes_the_kernels() -> None:
    assert set(found_without_interpreter(__file__)) == {"_share_kernel", "_store_kernel", "_score_kernel",
                                                        "_pick_kernel"}


def compile_kernels() -> list[str]:
    """This file runs as a program, in which Triton does not interpret."""
    from outrider.kernels.drafting import DraftSamplingKeys
    from outrider.kernels.gpu import store_drafts
    from outrider.kernels.gpu.drafts import passes as draft
    from outrider.kernels.step import NUM_COUNTS, Proposal

    device = torch.device("cpu")
    case = Case([Member(4, 4, 0x3333, ONE)] * 20, 30, [1 << CHANCE_BITS] * 4 * NUM_LEVELS, 4)
    ints = torch.zeros(20, dtype=torch.int64)
    keys = DraftSamplingKeys(torch.zeros(20), ints, ints, torch.zeros(4, 20, dtype=torch.int64), ints, ints)
    proposal = Proposal(torch.zeros(20, 4, dtype=torch.int64), ints, ints)
    drafts = torch.zeros(21, 4, dtype=torch.int64)
    with compiling() as found:
        for size in (case, replace(case, members=case.members * 13)):
            share_drafts(packet_of(size, device), rows_of(size, device), max_drafts=4)
        store_drafts(ints, [proposal], ints.bool(), ints[:1], vocab_size=9, fills=False, drafts=drafts,
                     num_drafts=drafts[:, 0].clone(), levels=drafts[:, 0].clone(),
                     counts=torch.zeros(20, NUM_COUNTS, dtype=torch.int64))
        for ids in (None, torch.zeros(5000, dtype=torch.int64)):
            draft.draw_drafts(torch.zeros(20, 5000), keys, 1, target_ids=ids, any_sampled=True, out=ints, levels=ints)
    return found


if __name__ == "__main__":
    import json

    print(json.dumps(compile_kernels()))
