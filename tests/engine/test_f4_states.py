"""F4, rows and backend alone: whatever was accepted, wherever a page ends, states and checkpoints are those of the
tokens, computed one by one. Every row that nobody owns holds NaN, and so does the pool.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.kinds import RecurrentKind, RecurrentSpec
from outrider.core import Axis, Limits, ScheduledBatch
from outrider.kernels.recurrent import CheckpointTargets
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages, split
from outrider.mixers.recurrent.recurrent_mixer import RecurrentState
from tests.covering import num_examples
from tests.engine.recurrent_rig import PAGE, BackendRig, K, Part, mixers

AROUND = range(PAGE - K - 2, PAGE + 2)  # prompts that end near a boundary


@pytest.mark.parametrize("prompt", AROUND)
@pytest.mark.parametrize("k", range(K + 1))
def test_f4_every_accepted_count_around_a_boundary(k: int, prompt: int) -> None:
    """After a step with k drafts of which some are accepted, the next one folds them, and takes the checkpoint in the
    fold or in its known token; a boundary among the rejected drafts is not taken."""
    for accepted in range(k + 1):
        rig = BackendRig()
        stream = rig.admit(2, seed=1)
        boundary = rig.target(stream, PAGE)
        written = rig.step([Part(stream, prompt)], [boundary])
        assert bool(written) == (prompt >= PAGE)
        if not written:
            written = rig.step([Part(stream, 1, k, accepted)], [boundary])
            assert bool(written) == (prompt + 1 == PAGE)
        if not written:
            written = rig.step([Part(stream, 1, k, 0)], [boundary])
            assert bool(written) == (prompt + 1 + accepted + 1 >= PAGE)


@pytest.mark.parametrize("known", [2, 3, 4, 5, 9, 20])
def test_f4_known_runs_after_drafts(known: int) -> None:
    """Folded first, then known tokens one by one or scanned, with boundaries in either, and drafts behind."""
    for accepted in range(K + 1):
        rig = BackendRig()
        stream = rig.admit(1, seed=2)
        rig.step([Part(stream, PAGE - 3)])
        rig.step([Part(stream, 1, K, accepted)])
        targets = [rig.target(stream, boundary) for boundary in (PAGE, 2 * PAGE)]
        written = rig.step([Part(stream, known, K, 2)], targets)
        reached = PAGE - 2 + accepted + known
        assert [w.boundary for w in written] == [b for b in (PAGE, 2 * PAGE) if b <= reached]
        rig.step([Part(stream, 1)])


def test_f4_a_boundary_is_written_once() -> None:
    rig = BackendRig()
    stream = rig.admit(1, seed=2)
    target = rig.target(stream, PAGE)
    counts = [len(rig.step([Part(stream, known, k, k)], [target] if at == 0 else [rig.target(stream, PAGE)]))
              for at, (known, k) in enumerate([(14, 0), (1, 2), (1, 0), (1, 4), (1, 0)])]
    assert counts == [0, 0, 1, 0, 0]


def test_f4_rows_that_skip_steps_keep_what_waits() -> None:
    rig = BackendRig()
    rests, works = rig.admit(1, seed=3), rig.admit(3, seed=4)
    rig.step([Part(rests, 13), Part(works, 14)])
    rig.step([Part(rests, 1, K, 3), Part(works, 1, 2, 1)])
    target = rig.target(rests, PAGE)
    for accepted in (0, 2, 4):
        rig.step([Part(works, 1, K, accepted)])
    assert rests.pending == 3
    assert rig.step([Part(works, 1), Part(rests, 1, 2, 0)], [target]) == [target]


def test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded() -> None:
    """It ended in the step that crossed the boundary, and the host, running ahead, has scheduled it again."""
    rig = BackendRig()
    ends, goes_on = rig.admit(1, seed=5), rig.admit(2, seed=6)
    rig.step([Part(ends, 12), Part(goes_on, 5)])
    rig.step([Part(ends, 1, K, 4), Part(goes_on, 1)])  # 17 tokens, 13 of them in the state
    ends.alive = False
    target = rig.target(ends, PAGE)
    assert rig.step([Part(ends, 1, K, 0), Part(goes_on, 1, 1, 1)], [target]) == []
    assert rig.fold([target]) == [target]


@pytest.mark.parametrize("accepted", range(K + 1))
def test_f4_a_fold_stops_at_its_boundary(accepted: int) -> None:
    rig = BackendRig()
    stream = rig.admit(1, seed=5)
    rig.step([Part(stream, PAGE - 3)])
    rig.step([Part(stream, 1, K, accepted)])  # the state has seen 14
    target = rig.target(stream, PAGE)
    assert bool(rig.fold([target])) == (accepted >= 2)


def test_f4_a_restored_row_goes_on_as_if_it_had_computed_all() -> None:
    rig = BackendRig()
    first = rig.admit(1, seed=7)
    targets = [rig.target(first, PAGE), rig.target(first, 2 * PAGE)]
    assert rig.step([Part(first, 40)], targets) == targets
    rig.release(first)
    for row, target in ((2, targets[1]), (1, targets[0])):
        again = rig.admit(row, seed=7, computed=target.boundary, pages=target.pages)
        rig.step([Part(again, 3)])
        rig.step([Part(again, 1, 3, 2)])
        rig.step([Part(again, 1)])


def test_f4_a_reused_row_never_sees_its_former_owner() -> None:
    """Neither its state, nor its tail, nor drafts that it left accepted and not folded."""
    rig = BackendRig()
    first = rig.admit(1, seed=8)
    rig.step([Part(first, 9)])
    rig.step([Part(first, 1, K, K)])
    del rig.streams[1]
    second = rig.admit(1, seed=9)  # nothing was cleared in between
    rig.step([Part(second, 1, K, 1)])
    rig.step([Part(second, 1)])


def test_f4_padded_and_dead_tokens_beside_all_kinds_of_requests() -> None:
    """A prompt's chunk, a one-token prompt, a row with drafts, one without, in one padded step."""
    rig = BackendRig()
    chunk, one, drafts, plain = (rig.admit(row, seed=10 + row) for row in (1, 2, 3, 4))
    rig.step([Part(drafts, 7), Part(plain, 11)], padded=(2, 5))
    rig.step([Part(drafts, 1, K, 2), Part(plain, 1)], padded=(1, 3))
    rig.step([Part(chunk, 19), Part(plain, 1, 0, 0, dead_drafts=2), Part(one, 1, 1, 1),
              Part(drafts, 1, 2, 2, dead_drafts=1)], padded=(3, 9))
    rig.step([Part(one, 1), Part(drafts, 1), Part(chunk, 6, 3, 1)])


def test_f4_a_wrong_idea_of_where_a_prompt_is_writes_nothing() -> None:
    """Boundaries of scanned tokens come from the host's bound. If that were ever wrong, nothing is reported."""
    rig = BackendRig()
    stream = rig.admit(1, seed=3)
    rig.step([Part(stream, 3)])
    scheduled_as = rig.rows.targets

    def late(batch: ScheduledBatch, num_requests: int) -> CheckpointTargets | None:
        return scheduled_as(replace(batch, bounds=[bound + 1 for bound in batch.bounds]), num_requests)

    rig.rows.targets = late  # type: ignore[method-assign]
    assert rig.step([Part(stream, 20)], [rig.target(stream, PAGE)]) == []


@settings(max_examples=num_examples(30))
@given(st.integers(0, 2**32))
def test_f4_any_life_of_rows(seed: int) -> None:
    """Random steps: chunks, drafts, acceptance, rows that rest, end, fold, and are taken again, some from
    checkpoints."""
    rng, rig = Random(seed), BackendRig()
    saved: list[tuple[int, int, list[int]]] = []  # seed, boundary, pages
    for _ in range(10):
        for row in range(1, 4):
            if row not in rig.streams and rng.random() < 0.6:
                known = rng.choice(saved) if saved and rng.random() < 0.6 else (rng.randrange(3), 0, [])
                rig.admit(row, known[0], known[1], known[2])
        parts, targets = [], []
        for stream in rng.sample(list(rig.streams.values()), rng.randint(0, len(rig.streams))):
            known = rng.choice([1, 1, 1, 2, 4, 5, 13])
            drafts = rng.randint(0, K)
            if stream.computed + known + drafts + 2 > 90:
                continue
            parts.append(Part(stream, known, drafts, rng.randint(0, drafts), dead_drafts=rng.randint(0, K - drafts)))
            low = stream.computed - stream.pending
            boundaries = range((low // PAGE + 1) * PAGE, stream.computed + known + 1, PAGE)
            targets += [rig.target(stream, boundary) for boundary in boundaries]
        if parts:
            most = max(part.stream.pending for part in parts)
            padded = (rng.randint(0, 2), rng.randint(0, 4))
            written = rig.step(parts, targets, padded, most_pending=rng.randint(most, K))
            assert written == [t for t in targets if rig.streams[t.row].alive]
            saved += [(rig.streams[t.row].seed, t.boundary, t.pages) for t in written]
        for stream in list(rig.streams.values()):
            if not stream.alive:
                if stream.pending and (end := stream.computed // PAGE * PAGE) > stream.computed - stream.pending:
                    (target,) = rig.fold([rig.target(stream, end)])
                    saved.append((stream.seed, end, target.pages))
                rig.release(stream)
            elif rng.random() < 0.15:
                stream.alive = False


@pytest.mark.parametrize("k", range(8))
def test_f4_buffers_are_what_capacity_says_for_every_k(k: int) -> None:
    limits = Limits(3, 64, 64, k, 8)
    rig = BackendRig(limits)
    row = rig.pool.layout.recurrent.capacity(limits)
    assert rig.rows.num_bytes == limits.extent(Axis.ROWS) * row.row_bytes
    for layer, own in rig.rows.layers.items():
        spec = mixers()[layer].spec
        assert own.state.shape == (4, *spec.state_shape) and own.tail.shape == (4, spec.conv_width - 1, spec.conv_dim)
        assert own.conv_in.shape == (4, k, spec.conv_dim) and [g.shape for g in own.gates] == [
            (4, k, size) for size in spec.gate_sizes
        ]
    assert rig.rows.pending.shape == (4,)


@settings(max_examples=200)
@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 17))
def test_a_layers_bytes_are_cut_into_pages_without_gaps(start: int, length: int, page_bytes: int) -> None:
    cells = []
    for piece in split(start, start + length, page_bytes):
        pages = range(piece.pages.start, piece.pages.stop)
        width = piece.columns.stop - piece.columns.start
        assert len(pages) * width == piece.source.stop - piece.source.start
        assert piece.source.start == len(cells)
        cells += [(page, column) for page in pages for column in range(piece.columns.start, piece.columns.stop)]
    assert cells == [divmod(byte, page_bytes) for byte in range(start, start + length)]


def test_a_checkpoint_keeps_the_bits_of_narrow_models() -> None:
    """A float32 state and a bfloat16 tail in a pool of bfloat16."""
    spec = RecurrentSpec(6, 4, (3, 5), (2,), 4, 2)
    kind = RecurrentKind(((2, spec), (7, spec)), 16, 40)
    pages = CheckpointPages(kind, torch.zeros(20, 20, dtype=torch.bfloat16), torch.bfloat16)
    saved = {layer: RecurrentState(torch.randn(2, 3, 5), torch.randn(2, 3, 6).bfloat16()) for layer in (2, 7)}
    where = torch.tensor([[3, 9, 4, 1, 12], [5, 6, 7, 8, 2]])
    for layer, states in saved.items():
        pages.write(layer, states, where, torch.tensor([True, True]))
    for layer, states in saved.items():
        found = pages.read(layer, where)
        assert torch.equal(found.state, states.state) and torch.equal(found.tail, states.tail)


def test_a_layer_that_keeps_nothing_has_an_empty_checkpoint() -> None:
    """A convolution over single tokens (Qwen4-Exp with ple_conv_kernel_size=1), beside a layer with a state."""
    spec, empty = RecurrentSpec(6, 4, (3, 5), (2,), 4, 2), RecurrentSpec(8, 1, (0,), (), 8, 2)
    pages = CheckpointPages(RecurrentKind(((2, spec), (7, empty)), 16, 40), torch.zeros(20, 20, dtype=torch.bfloat16),
                            torch.bfloat16)
    where = torch.tensor([[3, 9, 4], [5, 6, 7]])
    nothing = RecurrentState(torch.zeros(2, 0), torch.zeros(2, 0, 8).bfloat16())
    pages.write(7, nothing, where, torch.tensor([True, True]))
    found = pages.read(7, where)
    assert found.state.shape == (2, 0) and found.tail.shape == (2, 0, 8)
