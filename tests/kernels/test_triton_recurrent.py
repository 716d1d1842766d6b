"""Whole steps of recurrent layers by kernels against the torch path: outputs, states, tails, windows and checkpoints.

Two sets of rows live the same lives. Whatever nobody may read holds NaN: rows of nobody, windows without drafts, pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec
from outrider.core import NULL_ROW, CheckpointWrite, Limits, ScheduledBatch
from outrider.core.step_messages import CacheOrders
from outrider.kernels.gpu.recurrent import inputs as recurrent_inputs
from outrider.kernels.gpu.recurrent import mamba2
from outrider.kernels.gpu.recurrent.mamba2_scan import LongRuns
from outrider.layers.gated_delta import GatedDeltaMixer, GatedDeltaShape
from outrider.layers.kda import KDAMixer, KDANames, KDAShape
from outrider.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from outrider.layers.short_conv import ShortConvMixer
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.recurrent_mixer import RecurrentMixer, StepCounts
from outrider.mixers.recurrent.recurrent_rows import RecurrentRows
from outrider.mixers.recurrent.torch_backend import TorchRecurrent
from outrider.mixers.recurrent.triton_backend import TritonRecurrent
from tests.unit.made_requests import made_admission

WINDOW, PAGE, MAX_LEN = 3, 16, 512
Y_NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_mixers(dtype: torch.dtype, device: torch.device) -> dict[int, RecurrentMixer]:
    made = {
        0: Mamba2Mixer(Mamba2Shape(2, 6, 2, 5, 4, dt_limits=(0.01, 2.0)), dtype=dtype, device=device),
        1: GatedDeltaMixer(GatedDeltaShape(1, 2, 4, 6, 3), dtype=dtype, device=device),
        2: KDAMixer(KDAShape(2, 5, 3), KDANames(), dtype=dtype, device=device),
        3: KDAMixer(KDAShape(3, 4, 4, lower_bound=-5.0), KDANames(), dtype=dtype, device=device),
        4: ShortConvMixer(10, 3, bias=True, dtype=dtype, device=device),
        5: GatedDeltaMixer(GatedDeltaShape(1, 2, 4, 6, 3, max_beta=2.0), dtype=dtype, device=device),
    }
    generator = torch.Generator().manual_seed(0)
    for mixer in made.values():
        for slot in mixer.weights("").values():
            slot.store(torch.empty(slot.shape).normal_(0, 0.5, generator=generator))
        mixer.finalize()
    return made


@dataclass
class Life:
    """A request: what it has computed, and how much of that waits to be folded."""

    row: int
    computed: int = 0
    pending: int = 0


@dataclass
class Part:
    life: Life
    known: int
    drafts: int = 0
    accepted: int = 0
    dead_drafts: int = 0
    is_dead: bool = False  # ended, but scheduled again


class Twins:
    """The same steps in torch and by kernels."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, exact: bool = False, window: int = WINDOW,
                 layers: tuple[int, ...] = (0, 1, 2)) -> None:
        self.dtype, self.device, self.rng = dtype, device, Random(1)
        self.limits = Limits(max_requests=5, max_batched_tokens=256, max_len=MAX_LEN, max_drafts=window, vocab_size=8)
        self.mixers = {layer: mixer for layer, mixer in make_mixers(dtype, device).items() if layer in layers}
        claims = [LayerCache(layer, mixer.spec) for layer, mixer in self.mixers.items()]
        layout = plan_groups([LayerCache(9, FullSpec(1, 2, dtype.itemsize)), *claims], PAGE)
        self.num_pages = layout.recurrent.capacity(self.limits).checkpoint_pages
        self.pools = [DevicePool(layout, 400, dtype, device) for _ in range(2)]
        self.both = [RecurrentRows(self.mixers, self.limits, pool) for pool in self.pools]
        for rows, pool, backend in zip(self.both, self.pools, (TorchRecurrent, TritonRecurrent), strict=True):
            pool.data.fill_(torch.nan)
            rows.backend = backend(self.mixers, rows.layers, rows.pages, exact=exact)
            for own in rows.layers.values():
                for tensor in (own.state, own.tail, own.conv_in, *own.gates):
                    tensor.fill_(torch.nan)
        self._next_page = 1
        self._poison = self.pools[0].data.view(torch.int16)[0, 0].clone()
        self._given: list[list[int]] = []
        self.num_written = 0

    def admit(self, row: int, computed: int = 0) -> Life:
        """Where `computed` tokens are said to have led to is nothing, like any other place."""
        for rows in self.both:
            rows.admit([made_admission(row, [0], MAX_LEN, computed=computed)])
        return Life(row, computed)

    def target(self, life: Life, boundary: int) -> CheckpointWrite:
        pages = list(range(self._next_page, self._next_page + self.num_pages))
        self._next_page += self.num_pages
        self._given.append(pages)
        return CheckpointWrite(self._next_page, life.row, boundary, pages)

    def step(self, parts: list[Part], targets: list[CheckpointWrite] | None = None, padded: tuple[int, int] = (0, 0), *,
             listed: bool = False, bad: tuple[int, slice] | None = None) -> list[bool]:
        """Returns which targets were written. listed: by request, as captured steps have them. bad: a token row and the
        columns of its projection, of the convolution's inputs and then the gates, that are not finite."""
        order = [part.life.row for part in parts]
        counts, num_tokens = self._counts(parts, sorted(targets or [], key=lambda w: order.index(w.row)), padded)
        both = [replace(counts, pending=rows.pending[counts.rows]) for rows in self.both]
        if listed:
            by_row = {write.row: write.boundary for write in targets or []}
            boundaries = torch.tensor([by_row.get(row, -1) for row in counts.rows.tolist()], device=self.device)
            for i, rows in enumerate(self.both):
                rows.give_pages(targets or [])
                both[i] = replace(both[i], targets=rows.row_targets(counts.rows, boundaries))
        steps = [rows.backend.begin(own) for rows, own in zip(self.both, both, strict=True)]
        for layer, mixer in self.mixers.items():
            sizes = (mixer.spec.conv_dim, *mixer.spec.gate_sizes)
            # Slices of one projection, as layers have them.
            projected = torch.randn(num_tokens, sum(sizes) + 3, generator=torch.Generator().manual_seed(
                self.rng.randrange(2**31))).to(self.device, self.dtype)
            projected[num_tokens - padded[1] :] = torch.nan
            if bad is not None:
                projected[bad[0], 3:][bad[1]] = torch.nan
            conv_in, *gates = projected[:, 3:].split(sizes, dim=-1)
            near("y", *[step.run(layer, conv_in, tuple(gates)) for step in steps], Y_NEAR[self.dtype])
        accepted = torch.tensor([0 if p.is_dead else p.accepted for p in parts] + [0] * padded[0], device=self.device)
        flags = [rows.commit(step, accepted) for rows, step in zip(self.both, steps, strict=True)]
        for part in parts:
            if not part.is_dead:
                part.life.computed += part.known + part.accepted
                part.life.pending = part.accepted
        self.check([part.life for part in parts])
        assert flags[0].tolist() == flags[1].tolist()
        self.num_written += int(flags[0].sum())
        if listed:
            return flags[0].tolist()
        placed = sorted(targets or [], key=lambda w: order.index(w.row))
        was_written = {write.id: was for write, was in zip(placed, flags[0].tolist(), strict=True)}
        return [was_written[write.id] for write in targets or []]

    def fold(self, lives: list[Life], targets: list[CheckpointWrite]) -> list[bool]:
        computed = torch.zeros(self.limits.max_requests + 1, dtype=torch.int64, device=self.device)
        for life in lives:
            computed[life.row] = life.computed
        flags = [rows.fold(targets, computed) for rows in self.both]
        assert flags[0].tolist() == flags[1].tolist()
        self.check(lives)
        return flags[0].tolist()

    def check(self, lives: list[Life]) -> None:
        """Windows count as far as something waits in them; rows of nobody and pages, NaN by NaN."""
        for layer in self.mixers:
            torch_rows, own = (rows.layers[layer] for rows in self.both)
            near("state", torch_rows.state, own.state)
            assert torch.equal(torch_rows.tail.nan_to_num(99), own.tail.nan_to_num(99)), "tail"
            for life in lives:
                for a, b in zip((torch_rows.conv_in, *torch_rows.gates), (own.conv_in, *own.gates), strict=True):
                    assert torch.equal(a[life.row, : life.pending], b[life.row, : life.pending]), "window"
            for tensor in (own.state, own.tail, own.conv_in, *own.gates):
                assert tensor[NULL_ROW].isnan().all()
        touched = [(pool.data.view(torch.int16) != self._poison).any(dim=1) for pool in self.pools]
        assert torch.equal(*touched), "other pages were written"
        if self._given:
            given = torch.tensor(self._given, device=self.device)
            for layer in self.mixers:
                wanted, found = (rows.pages.read(layer, given) for rows in self.both)
                near("checkpoint", wanted.state, found.state)
                assert torch.equal(wanted.tail.nan_to_num(99), found.tail.nan_to_num(99)), "tail of a checkpoint"

    def _counts(self, parts: list[Part], targets: list[CheckpointWrite],
                padded: tuple[int, int]) -> tuple[StepCounts, int]:
        extra, rows = [0] * padded[0], [p.life.row for p in parts]
        known, drafts = [p.known for p in parts], [p.drafts + p.dead_drafts for p in parts]
        lens = [k + d for k, d in zip(known, drafts, strict=True)] + extra
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        request_of = [i for i, n in enumerate(lens) for _ in range(n)] + [len(lens) - 1] * padded[1]
        bounds = [p.life.computed + k + d for p, k, d in zip(parts, known, drafts, strict=True)]
        scheduled = ScheduledBatch(0, rows, [0] * len(parts), rows, known, drafts, [True] * len(parts), bounds,
                                   cache=CacheOrders(checkpoints=targets))
        ints = torch.tensor([
            [*rows, *[NULL_ROW] * padded[0]], [*(p.life.computed for p in parts), *extra],
            [*(0 if p.is_dead else p.known for p in parts), *extra],
            [*(0 if p.is_dead else p.drafts for p in parts), *extra],
        ], device=self.device)
        counts = StepCounts(
            ints[0], torch.tensor(starts, device=self.device), torch.tensor(request_of, device=self.device), *ints[1:],
            ints[1], tuple(lens), (*known, *extra), max(drafts), self.limits.max_drafts,
            self.both[0].targets(scheduled, len(lens)),
        )
        return counts, len(request_of)


def near(what: str, wanted: torch.Tensor, actual: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert torch.equal(wanted.isnan(), actual.isnan()), f"{what}: NaN in other places"
    wanted, actual = (t.float().nan_to_num(0) for t in (wanted, actual))
    assert ((wanted - actual).abs() <= tolerance * (1 + wanted.abs())).all(), (
        f"{what}: off by {(wanted - actual).abs().max()}"
    )


def test_every_accepted_count_around_a_boundary(device: torch.device, dtype: torch.dtype) -> None:
    """Boundaries among pending drafts, in the known token, in rejected drafts and not reached, all in one batch."""
    twins = Twins(dtype, device)
    lives = [twins.admit(row, PAGE - 2 - row) for row in range(1, 5)]
    twins.step([Part(life, 1, WINDOW, (3, 3, 1, 0)[i]) for i, life in enumerate(lives)],
               [twins.target(life, PAGE) for life in lives])
    targets = [twins.target(life, PAGE) for life in lives]
    flags = twins.step([Part(life, 1, i, i // 2) for i, life in enumerate(lives[::-1])], targets)
    assert flags == [True, True, False, False]
    assert lives[3].computed - lives[3].pending == PAGE - 4
    targets = [twins.target(lives[3], PAGE), twins.target(lives[1], 2 * PAGE)]
    twins.step([Part(life, 1) for life in lives], targets, padded=(1, 2), listed=True)
    flags = twins.step([Part(life, 3) for life in lives], targets, listed=True)
    assert flags == [False, False, False, True]


def test_without_a_window(device: torch.device) -> None:
    twins = Twins(torch.float32, device, window=0)
    life = twins.admit(1)
    for known in (2, 1):
        twins.step([Part(life, known)], padded=(1, 2))


@pytest.mark.parametrize("layer", [3, 4, 5], ids=["bounded decays", "convolution", "strong corrections"])
def test_layers_of_other_kinds(device: torch.device, dtype: torch.dtype, layer: int) -> None:
    twins = Twins(dtype, device, layers=(layer,))
    life, other = twins.admit(1), twins.admit(2)
    assert twins.step([Part(life, 18, 2, 1), Part(other, 1, 3, 3)], [twins.target(life, PAGE)], padded=(1, 2)) == [True]
    twins.step([Part(other, 2, 1), Part(life, 1)])
    twins.step([Part(other, 1, 2, 2), Part(life, 3, is_dead=True)])


@pytest.mark.parametrize(("known", "exact"), [(33, False), (6, True), pytest.param(70, False, marks=pytest.mark.long)])
def test_prompts(device: torch.device, dtype: torch.dtype, known: int, exact: bool) -> None:
    """From nothing, with drafts behind, and behind pending drafts; cut by boundaries."""
    twins = Twins(dtype, device, exact=exact)
    long, short, one = twins.admit(1), twins.admit(3), twins.admit(4, computed=PAGE - 1)
    assert twins.step([Part(long, known, 2, 2), Part(short, 4), Part(one, 1, 2, 2)],
                      [twins.target(one, PAGE), *(twins.target(long, b) for b in (PAGE, 2 * PAGE))]) == [
        True, known > PAGE, known > 2 * PAGE]
    twins.step([Part(one, 7), Part(short, 5), Part(long, 5, 1, 1)], padded=(1, 3))


def test_long_runs_in_chunks_side_by_side(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long runs beside a short one, of which one ends at the end of a chunk; checkpoints in chunks, at their ends
    and at the end of the run. Then a dead row, and a run behind pending drafts, which goes another way."""
    monkeypatch.setattr(mamba2, "LongRuns", lambda: LongRuns(chunk=32, more_than=40))
    monkeypatch.setattr(recurrent_inputs, "inputs_tile", lambda tokens: (8, 16, 4))
    counted = monkeypatch_counter(monkeypatch, mamba2, "scan_long_runs")
    twins = Twins(torch.bfloat16, device, layers=(0,))  # in blocks of eight token rows, some of which span requests
    lives = [twins.admit(1, computed=3), twins.admit(3), twins.admit(4)]
    targets = [twins.target(lives[0], b) for b in (PAGE, 48)] + [twins.target(lives[1], b) for b in (32, 64)]
    assert all(twins.step([Part(lives[0], 45), Part(lives[2], 5, 2, 2), Part(lives[1], 64)], targets, padded=(1, 2)))
    twins.step([Part(lives[2], 42), Part(lives[0], 41), Part(lives[1], 41, is_dead=True)])
    assert counted == [1, 1]


ALL = slice(None)


@pytest.mark.parametrize("bad_at", [3, PAGE - 1, PAGE])
def test_a_token_that_is_not_finite_in_a_chunk(device: torch.device, bad_at: int) -> None:
    """In the middle of a chunk, at its end, and behind the boundary of a checkpoint. Others in the batch do not see it,
    nor does the request that has the row next."""
    twins = Twins(torch.float32, device)
    life, other = twins.admit(1), twins.admit(2)
    twins.step([Part(life, PAGE + 2), Part(other, 5)], [twins.target(life, PAGE)], bad=(bad_at, ALL))
    for rows in twins.both:
        for layer, own in rows.layers.items():
            assert own.state[life.row].isnan().all() and own.state[other.row].isfinite().all()
            state = rows.pages.read(layer, torch.tensor(twins._given, device=device)).state
            assert state.isfinite().all() if bad_at == PAGE else state.isnan().all()
    twins.step([Part(twins.admit(life.row), 2), Part(other, 1)])


@pytest.mark.parametrize(("layer", "columns"), [
    (0, slice(0, 12)), (0, slice(12, 22)), (0, slice(22, 32)), (0, slice(32, None)),  # x, B, C, dt
    (1, slice(0, 4)), (1, slice(4, 8)), (1, slice(8, 20)), (1, slice(20, 22)), (1, slice(22, None)),  # q, k, v, g, beta
    (2, slice(0, 10)), (2, slice(10, 20)), (2, slice(20, 30)), (2, slice(30, 40)), (2, slice(40, None)),
])
def test_each_input_of_a_chunk_that_is_not_finite(device: torch.device, layer: int, columns: slice) -> None:
    twins = Twins(torch.float32, device, layers=(layer,))
    twins.step([Part(twins.admit(1), 7)], bad=(3, columns))


@pytest.mark.parametrize("columns", [ALL, slice(0, 12), slice(12, 22), slice(22, 32), slice(32, None)])
def test_a_token_that_is_not_finite_in_a_long_run(
    device: torch.device, columns: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another long run; a checkpoint before the token in its chunk, one behind it."""
    monkeypatch.setattr(mamba2, "LongRuns", lambda: LongRuns(chunk=32, more_than=40))
    twins = Twins(torch.bfloat16, device, layers=(0,))
    life, other = twins.admit(1), twins.admit(2)
    targets = [twins.target(life, PAGE), twins.target(life, 2 * PAGE)]
    assert all(twins.step([Part(life, 41), Part(other, 42)], targets, bad=(20, columns)))


def test_a_rejected_draft_that_is_not_finite_leaves_no_trace(device: torch.device) -> None:
    twins = Twins(torch.float32, device)
    life = twins.admit(1)
    twins.step([Part(life, 1, WINDOW, accepted=1)], bad=(2, ALL))
    twins.step([Part(life, 1, 1)])
    for rows in twins.both:
        assert all(own.state[life.row].isfinite().all() for own in rows.layers.values())


def monkeypatch_counter(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[int]:
    """A list that gets a 1 for every call of the module's function."""
    calls: list[int] = []
    function = getattr(module, name)

    def counting(*args: object, **options: object) -> object:
        calls.append(1)
        return function(*args, **options)

    monkeypatch.setattr(module, name, counting)
    return calls


@pytest.mark.parametrize("before", [1, 4, 5])
def test_a_run_behind_a_fold_that_reaches_a_boundary(device: torch.device, before: int) -> None:
    twins = Twins(torch.float32, device)
    life = twins.admit(2, PAGE - before)
    twins.step([Part(life, 1, WINDOW, 3)])
    assert twins.step([Part(life, 5)], [twins.target(life, PAGE)]) == [before > 1]


def test_dead_rows_keep_everything_and_can_still_be_folded(device: torch.device) -> None:
    twins = Twins(torch.float32, device)
    ends, goes_on = twins.admit(1, PAGE - 3), twins.admit(2)
    twins.step([Part(ends, 1, WINDOW, 3), Part(goes_on, 1)])
    target = twins.target(ends, PAGE)
    assert twins.step([Part(ends, 1, 2, is_dead=True), Part(goes_on, 1, 1, 1, dead_drafts=2)], [target],
                      padded=(2, 7)) == [False]
    assert twins.fold([ends], [target]) == [True]
    assert twins.fold([ends], [twins.target(ends, 2 * PAGE)]) == [False]


def check_random_lives(device: torch.device, seed: int, num_steps: int) -> None:
    twins, rng = Twins(torch.float32, device), Random(seed)
    lives = {row: twins.admit(row, rng.randrange(PAGE)) for row in (1, 3, 4, 5)}
    for _ in range(num_steps):
        parts, targets = [], []
        for life in rng.sample(list(lives.values()), rng.randint(1, 4)):
            known, drafts = rng.choice([1, 1, 1, 2, 4, 5, 8]), rng.randint(0, WINDOW)
            parts.append(Part(life, known, drafts, rng.randint(0, drafts), rng.randint(0, WINDOW - drafts),
                              rng.random() < 0.15))
            low = life.computed - life.pending
            targets += [twins.target(life, b) for b in range((low // PAGE + 1) * PAGE, life.computed + known + 1, PAGE)]
        rng.shuffle(targets)
        twins.step(parts, targets, (rng.randint(0, 2), rng.randint(0, 4)))
    assert twins.num_written > 0


def test_random_lives(device: torch.device) -> None:
    check_random_lives(device, 0, 4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_more_random_lives(device: torch.device, seed: int) -> None:
    check_random_lives(device, seed, 10)


@pytest.mark.long
def test_warming_up_changes_nothing(device: torch.device) -> None:
    twins = Twins(torch.float32, device)
    twins.both[1].warm_up()
    twins.check([])


def test_a_strange_shape_is_refused(device: torch.device) -> None:
    twins = Twins(torch.float32, device)
    life = twins.admit(1)
    counts, _ = twins._counts([Part(life, 2)], [], (0, 0))
    step = twins.both[1].backend.begin(counts)
    spec = twins.mixers[0].spec
    with pytest.raises(ValueError, match="gates"):
        step.run(0, torch.zeros(2, spec.conv_dim, device=device), (torch.zeros(2, 3, device=device),))
