"""The gated delta kernel, also with a decay for each key channel (KDA), against the torch backend: ragged steps of
folds, known tokens and drafts, and checkpoints.

Whatever must not be read is not a number: other rows, drafts that are not pending, dead tokens' inputs, pages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.cache.kinds import RecurrentKind
from outrider.kernels import recurrent
from outrider.kernels.gpu.gated_delta.prepare import PrepareConfig
from outrider.kernels.gpu.gated_delta.steps import ChunkConfig, delta_steps
from outrider.kernels.gpu.recurrent.step_tensors import (
    LayerTensors,
    StepConfig,
    StepInputs,
    StepTensors,
)
from outrider.kernels.recurrent import CheckpointTargets, ScanTarget
from outrider.layers.gated_delta import GatedDeltaMixer, GatedDeltaShape
from outrider.layers.kda import KDAMixer, KDANames, KDAShape
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages
from outrider.mixers.recurrent.recurrent_mixer import LayerRows, StepCounts
from outrider.mixers.recurrent.torch_backend import TorchRecurrent

NAN = float("nan")
SHAPE = GatedDeltaShape(num_key_heads=2, num_value_heads=4, key_dim=7, value_dim=11, conv_width=4)
SMALL = GatedDeltaShape(num_key_heads=1, num_value_heads=2, key_dim=7, value_dim=5, conv_width=4)
KDA = KDAShape(num_heads=3, head_dim=11, conv_width=4)
SMALL_KDA = KDAShape(num_heads=2, head_dim=5, conv_width=4)
Shape = GatedDeltaShape | KDAShape
WINDOW, NUM_ROWS, NUM_PAGES, PAGE_ELEMENTS = 3, 9, 64, 150
LAYER = 5


class Asked(NamedTuple):
    """A request of a step."""

    known: int  # as scheduled
    drafts: int = 0  # as scheduled
    pending: int = 0
    live_drafts: int | None = None
    is_dead: bool = False
    boundaries: tuple[int, ...] = ()  # tokens after those that the state covers; any order
    seen: int = 17  # tokens that the state covers


@dataclass
class Case:
    mixer: GatedDeltaMixer | KDAMixer
    counts: StepCounts
    rows: LayerRows
    conv_in: torch.Tensor
    gates: tuple[torch.Tensor, ...]
    pool: torch.Tensor
    kind: RecurrentKind

    @property
    def num_requests(self) -> int:
        return self.counts.rows.shape[0]

    def copy(self) -> Case:
        rows = LayerRows(self.rows.state.clone(), self.rows.tail.clone(), self.rows.conv_in.clone(),
                         tuple(gate.clone() for gate in self.rows.gates))
        return Case(self.mixer, self.counts, rows, self.conv_in, self.gates, self.pool.clone(), self.kind)

    def wide(self) -> Case:
        """The same in float64, which the torch backend then computes in."""
        mixer = make_mixer(self.mixer.shape, torch.float64)
        own = self.rows
        rows = LayerRows(own.state.double(), own.tail.double(), own.conv_in.double(),
                         tuple(gate.double() for gate in own.gates))
        kind = RecurrentKind(((LAYER - 1, mixer.spec), (LAYER, mixer.spec)), page_bytes=PAGE_ELEMENTS * 8)
        return Case(mixer, self.counts, rows, self.conv_in.double(), tuple(g.double() for g in self.gates),
                    self.pool.double(), kind)


def make_mixer(shape: Shape, dtype: torch.dtype) -> GatedDeltaMixer | KDAMixer:
    mixer: GatedDeltaMixer | KDAMixer
    if isinstance(shape, KDAShape):
        mixer = KDAMixer(shape, KDANames(), dtype=dtype, device=torch.device("cpu"))
    else:
        mixer = GatedDeltaMixer(shape, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for slot in mixer.weights("").values():
        slot.target.copy_(torch.empty(slot.shape).normal_(0.0, 0.7, generator=generator))
    mixer.finalize()
    return mixer


def make_case(
    asked: list[Asked], shape: Shape = SMALL, *, num_padded: int = 0, padded_tokens: int = 0, seed: int = 0
) -> Case:
    """Requests in rows 1, 2 ..; padded ones in row 0, which holds no numbers, as do all rows that take no part."""
    generator = torch.Generator().manual_seed(seed)
    mixer, count = make_mixer(shape, torch.float32), len(asked) + num_padded
    order = torch.randperm(NUM_ROWS - 1, generator=generator)[: len(asked)] + 1

    def kept(*shape: int, is_there: torch.Tensor | None = None) -> torch.Tensor:
        whole = torch.full((NUM_ROWS, *shape), NAN)
        part = torch.randn(len(asked), *shape, generator=generator) * 1.5
        whole[order] = part if is_there is None else torch.where(is_there, part, NAN)
        return whole

    pending = torch.tensor([a.pending for a in asked])
    waits = (torch.arange(WINDOW) < pending[:, None])[..., None]
    spec = mixer.spec
    rows = LayerRows(kept(*spec.state_shape), kept(spec.conv_width - 1, spec.conv_dim),
                     kept(WINDOW, spec.conv_dim, is_there=waits),
                     tuple(kept(WINDOW, size, is_there=waits) for size in spec.gate_sizes))
    known = [0 if a.is_dead else a.known for a in asked] + [0] * num_padded
    scheduled = [a.drafts if a.live_drafts is None else a.live_drafts for a in asked]
    drafts = [0 if a.is_dead else n for a, n in zip(asked, scheduled, strict=True)] + [0] * num_padded
    lens = [a.known + a.drafts for a in asked] + [0] * num_padded
    starts = list(accumulate(lens, initial=0))
    tokens = starts[-1] + padded_tokens
    projected = torch.randn(tokens, spec.conv_dim + sum(spec.gate_sizes) + 3, generator=generator) * 1.5
    for i in range(count):
        projected[starts[i] + known[i] + drafts[i] : starts[i + 1]] = NAN
    projected[starts[-1] :] = NAN
    conv_in, first, second, _ = projected.split((spec.conv_dim, *spec.gate_sizes, 3), dim=1)
    kind = RecurrentKind(((LAYER - 1, spec), (LAYER, spec)), page_bytes=PAGE_ELEMENTS * 4)
    seen = torch.tensor([a.seen for a in asked] + [0] * num_padded)
    waiting = torch.cat((pending, torch.zeros(num_padded, dtype=torch.int64)))
    request_of = torch.searchsorted(torch.tensor(starts[1:]), torch.arange(tokens), right=True)
    counts = StepCounts(
        rows=torch.cat((order, torch.zeros(num_padded, dtype=torch.int64))), query_starts=torch.tensor(starts),
        request_of=request_of.clamp_max(count - 1), computed=seen + waiting, num_known=torch.tensor(known),
        num_drafts=torch.tensor(drafts), pending=waiting, query_lens=tuple(lens),
        known_lens=tuple([a.known for a in asked] + [0] * num_padded), most_drafts=max(a.drafts for a in asked),
        most_pending=WINDOW, targets=make_targets(asked, kind, count),
    )
    return Case(mixer, counts, rows, conv_in, (first, second), torch.full((NUM_PAGES, PAGE_ELEMENTS), NAN), kind)


def make_targets(asked: list[Asked], kind: RecurrentKind, num_requests: int) -> CheckpointTargets | None:
    writes = [(i, a.seen + b, a.seen + a.pending) for i, a in enumerate(asked) for b in a.boundaries]
    if not writes:
        return None
    per_checkpoint = -(-kind.checkpoint_bytes // kind.page_bytes)
    assert len(writes) * per_checkpoint < NUM_PAGES
    pages = torch.arange(1, NUM_PAGES)[torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(4))]
    request, boundary, _ = (torch.tensor(column) for column in zip(*writes, strict=True))
    scans = tuple(ScanTarget(i, target, there - start) for target, (i, there, start) in enumerate(writes))
    return CheckpointTargets(torch.searchsorted(request, torch.arange(num_requests + 1)), request, boundary,
                             pages[: len(writes) * per_checkpoint].view(len(writes), -1), scans)


def make_inputs(case: Case) -> StepInputs:
    """What the recurrence takes, in torch; not a number where no live token is."""
    counts, rows, mixer = case.counts, case.rows, case.mixer
    size = case.num_requests * WINDOW + case.conv_in.shape[0]
    convolved = torch.full((size, mixer.spec.conv_dim), NAN)
    wide = [torch.full((size, width), NAN) for width in mixer.spec.gate_sizes]
    for i, row in enumerate(counts.rows.tolist()):
        start, pending = int(counts.query_starts[i]), int(counts.pending[i])
        live = int(counts.num_known[i] + counts.num_drafts[i])
        if live == 0 and counts.known_lens[i] > 0:
            continue
        places = torch.cat((i * WINDOW + torch.arange(pending),
                            case.num_requests * WINDOW + start + torch.arange(live)))
        seen = torch.cat((rows.tail[row], rows.conv_in[row, :pending], case.conv_in[start : start + live]))
        gates = [torch.cat((kept[row, :pending], fresh[start : start + live]))
                 for kept, fresh in zip(rows.gates, case.gates, strict=True)]
        for j, place in enumerate(places.tolist()):  # token by token: torch's bits depend on how many there are
            one = recurrent.causal_conv(seen[j : j + SHAPE.conv_width], mixer.conv_weight, mixer.conv_bias)
            convolved[place] = one[0]
            for gate, made in zip(wide, mixer.inputs(one, tuple(g[j : j + 1] for g in gates))[3:], strict=True):
                gate[place] = made[0].flatten()
    return StepInputs(case.conv_in, case.gates, convolved, tuple(wide))


def run_kernel(case: Case, device: torch.device, inputs: StepInputs | None = None, **options: object) -> torch.Tensor:
    """Changes the case's rows and pool; y."""
    counts, inputs = case.counts, inputs or make_inputs(case)

    def moved(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(device) for tensor in tensors)

    step = StepTensors.stack(*moved((counts.rows, counts.query_starts, counts.computed, counts.num_known,
                                  counts.num_drafts, counts.pending, counts.request_of)))
    conv_in, *gates = moved((inputs.conv_in, *inputs.gates))
    convolved, *wide = moved((inputs.convolved, *inputs.wide_gates))
    own = case.rows
    state, tail, window, *windows = moved((own.state, own.tail, own.conv_in, *own.gates))
    targets, pool = None, case.pool.to(device)
    if counts.targets is not None:
        targets = CheckpointTargets(*moved(counts.targets[:4]))
    params = case.mixer.kernel_params()
    assert params is not None
    options = {"num_key_heads": params.num_groups, "per_channel": params.kind == "kda", "targets": targets} | options
    y = delta_steps(step, StepInputs(conv_in, tuple(gates), convolved, tuple(wide)),
                    LayerTensors(state, tail, window, tuple(windows), pool, case.kind.starts()[LAYER]), **options)
    case.rows = LayerRows(state.cpu(), tail.cpu(), window.cpu(), tuple(gate.cpu() for gate in windows))
    case.pool = pool.cpu()
    return y.cpu()


def run_torch(case: Case) -> torch.Tensor:
    pages = CheckpointPages(case.kind, case.pool, case.conv_in.dtype)
    layers = TorchRecurrent({LAYER: case.mixer}, {LAYER: case.rows}, pages, exact=True)
    return layers.begin(case.counts).run(LAYER, case.conv_in, case.gates)


def saved_states(case: Case) -> torch.Tensor:
    """[checkpoints, heads, v dim, k dim]; not a number where none was written."""
    assert case.counts.targets is not None
    pages = CheckpointPages(case.kind, case.pool, case.conv_in.dtype)
    return pages.read(LAYER, case.counts.targets.pages).state


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert torch.equal(actual.isnan(), wanted.isnan()), f"{what}: other places are written"
    scale = float(wanted.nan_to_num().abs().max())
    far = float((actual.double() - wanted.double()).nan_to_num().abs().max())
    assert far <= 1e-5 * max(1.0, scale), f"{what}: off by {far} of {scale}"


def check(case: Case, device: torch.device, **options: object) -> Case:
    """Runs both; returns the case as the kernel left it."""
    wanted, before, found = case.wide(), case.copy(), case.copy()
    wanted_y, y = run_torch(wanted), run_kernel(found, device, **options)
    assert_close(y, wanted_y, "y")
    live = case.counts.num_known > 0
    rows = case.counts.rows[live]
    others = [row for row in range(NUM_ROWS) if row not in rows.tolist()]
    assert_close(found.rows.state[rows], wanted.rows.state[rows], "state")
    assert torch.equal(found.rows.tail[rows].double(), wanted.rows.tail[rows])
    windows = zip((found.rows.conv_in, *found.rows.gates), (wanted.rows.conv_in, *wanted.rows.gates), strict=True)
    for own, want in windows:
        for row, drafts in zip(rows.tolist(), case.counts.num_drafts[live].tolist(), strict=True):
            assert torch.equal(own[row, :drafts].double(), want[row, :drafts]), "inputs of drafts wait in the window"
    for own, was in ((found.rows.state, before.rows.state), (found.rows.tail, before.rows.tail),
                     (found.rows.conv_in, before.rows.conv_in), (found.rows.gates[1], before.rows.gates[1])):
        assert torch.equal(own[others].nan_to_num(nan=7.0), was[others].nan_to_num(nan=7.0)), "others keep all"
    if case.counts.targets is not None:
        assert_close(saved_states(found), saved_states(wanted), "checkpoints")
        state_words = case.mixer.spec.state_bytes // 4
        written = case.counts.passes(case.counts.targets)
        assert int((~found.pool.isnan()).sum()) == int(written.sum()) * state_words, "and nothing else of the pool"
    return found


@pytest.mark.parametrize("shape", [SHAPE, KDA], ids=["head", "channel"])
def test_a_ragged_step(device: torch.device, shape: Shape) -> None:
    asked = [Asked(1), Asked(1, 3, pending=3), Asked(2, 2, pending=1, live_drafts=1), Asked(4, pending=2),
             Asked(1, 3, pending=1, is_dead=True), Asked(3, 1, pending=0)]
    check(make_case(asked, shape, num_padded=2, padded_tokens=3), device)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_with_long_runs(device: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    asked = []
    for known in (draw.choice((5, 16, 32, 33, 70)), draw.randint(1, 4), draw.randint(5, 40), 1):
        drafts = draw.randint(0, 3)
        asked.append(Asked(known, drafts, draw.randint(0, 3), draw.randint(0, drafts), draw.random() < 0.2))
    shape = (SHAPE, SMALL, SMALL, KDA, SMALL_KDA)[seed]
    case = make_case(asked, shape, num_padded=seed, padded_tokens=2 * seed, seed=seed)
    check(case, device, chunked=True, chunks=ChunkConfig((16, 32, 64, 16, 32)[seed]))


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("shape", [SMALL, SMALL_KDA], ids=["head", "channel"])
def test_every_chunk_size_serves_ragged_batches(device: torch.device, shape: Shape, chunk: int) -> None:
    """Short and long runs, drafts behind and folds before them, dead and padded requests, padded token rows. Slots of
    neighbours are close where runs begin at any token row."""
    asked = [Asked(chunk - 1, 1), Asked(5, 3, 3, live_drafts=2), Asked(2, 2, 1), Asked(chunk, 0, 2),
             Asked(chunk + 3, 2, is_dead=True), Asked(2 * chunk + 1, 3, 1), Asked(1), Asked(4, 3, 2)]
    case = make_case(asked, shape, num_padded=2, padded_tokens=5, seed=chunk)
    check(case, device, chunked=True, chunks=ChunkConfig(chunk), config=StepConfig(16, 1))


@pytest.mark.parametrize("shape", [GatedDeltaShape(1, 2, 40, 70, 4), KDAShape(1, 40, 4)], ids=["head", "channel"])
def test_heads_of_several_pieces_and_tiles(device: torch.device, shape: Shape) -> None:
    """Neither fills its last piece or tile."""
    case = make_case([Asked(21, 1), Asked(40, 0, 1)], shape)
    chunks = ChunkConfig(32, prepare=PrepareConfig(16, 1))
    check(case, device, chunked=True, chunks=chunks, config=StepConfig(16, 1))


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_channels_that_forget_at_once_beside_channels_that_keep_all(device: torch.device, chunk: int) -> None:
    """Decays between two tokens have no two factors that hold for every pair. Logarithms of
    about -1000, -1 and -0.001 side by side, and a decay to nothing."""
    case = make_case([Asked(75, 2, 1)], SMALL_KDA)
    tokens = torch.arange(case.conv_in.shape[0])[:, None]
    case.gates[0][:, ::3] = torch.where(tokens % 5 == 0, 3000.0, -20.0)
    case.gates[0][:, 2::3] = torch.where(tokens % 19 == 7, 1000.0, -7.0)
    case.gates[0][3, 1::3] = torch.inf
    check(case, device, chunked=True, chunks=ChunkConfig(chunk))


def test_a_channel_that_is_not_finite_fails_no_token_before_it(device: torch.device) -> None:
    case = make_case([Asked(37)], SMALL_KDA)
    case.gates[0][21, 2] = NAN
    y = run_kernel(case, device, chunked=True)
    heads = y.unflatten(1, (SMALL_KDA.num_heads, -1))
    assert heads[:21].isfinite().all() and heads[:, 1].isfinite().all(), "the other head goes on"
    assert heads[21:, 0].isnan().all()


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("part", ["key", "value", "decay", "beta"])
def test_a_token_that_is_not_finite_fails_no_token_before_it(device: torch.device, part: str, chunk: int) -> None:
    """The other head goes on, and so does the other request. A checkpoint before the token is whole."""
    heads, dim = SMALL_KDA.num_heads, SMALL_KDA.head_dim
    case = make_case([Asked(77, 1, boundaries=(20, 21, 22, 64)), Asked(20)], SMALL_KDA)
    if part in ("decay", "beta"):
        case.gates[0 if part == "decay" else 1][21, 0] = NAN
    else:
        case.conv_in[21, heads * dim * (1 if part == "key" else 2)] = torch.inf
    y = run_kernel(case, device, chunked=True, chunks=ChunkConfig(chunk)).unflatten(1, (heads, -1))
    assert y[:21].isfinite().all() and y[:, 1].isfinite().all() and y[78:].isfinite().all()
    assert y[21:78, 0].isnan().all()
    found = saved_states(case).isfinite()
    assert found[:2].all() and found[:, 1].all(), "before the token, and of the other head"
    assert not found[2:, 0].all(dim=(1, 2)).any()


def test_a_query_that_is_not_finite_fails_its_token_alone(device: torch.device) -> None:
    case = make_case([Asked(40)], SMALL_KDA)
    inputs = make_inputs(case)
    inputs.convolved[WINDOW + 18, 0] = NAN
    y = run_kernel(case, device, inputs=inputs, chunked=True)
    assert y.isnan().any(dim=1).nonzero().flatten().tolist() == [18]


def test_checkpoints_at_every_offset(device: torch.device) -> None:
    """Before, within and after folds, known tokens and drafts; none is written by drafts or where the walk begins."""
    asked = [Asked(3, 2, 2, boundaries=(4, 0, 2, 1, 5, 3, 6, 7, 8)), Asked(3, 2, 2, is_dead=True, boundaries=(1, 3)),
             Asked(1, boundaries=(1, 1))]
    found = check(make_case(asked, num_padded=1, padded_tokens=1), device)
    written = ~saved_states(found).isnan().flatten(1).any(dim=1)
    assert written.tolist() == [True, False] + [True] * 4 + [False] * 5 + [True] * 2


@pytest.mark.parametrize("offset", range(0, 24, 3))
def test_checkpoints_in_long_runs(device: torch.device, offset: int) -> None:
    case = make_case([Asked(18, 2, 1, boundaries=(offset + 1, offset))], seed=offset)
    check(case, device, chunked=True)


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("shape", [SMALL, SMALL_KDA], ids=["head", "channel"])
def test_boundaries_at_every_place_of_a_chunk(device: torch.device, shape: Shape, chunk: int) -> None:
    """Several in a chunk, at its first token and at its end, in folded drafts and at the last known token; repeated."""
    first = (1, 2, 3, chunk // 2, chunk + 1, chunk + 2, chunk + 2, chunk + 3, 2 * chunk + 2)
    asked = [Asked(2 * chunk + 9, 2, 2, boundaries=first), Asked(chunk + 5, boundaries=(chunk, chunk + 5, chunk + 6)),
             Asked(3, 1, 2, boundaries=(4,))]
    case = make_case(asked, shape, num_padded=1, padded_tokens=2)
    check(case, device, chunked=True, chunks=ChunkConfig(chunk))


@pytest.mark.parametrize("tile", [4, 16])
def test_tiles_do_not_matter(device: torch.device, tile: int) -> None:
    """With keys that fill a warp, as those of models do. Under the interpreter to a bit; a card's compiler fuses
    multiplications and additions of a state by the tile, which depends on nothing but the size of values."""
    case = make_case([Asked(2, 2, 2), Asked(1, 1, 3)], GatedDeltaShape(1, 1, 128, 16, 4))
    one, other = case.copy(), case.copy()
    y = run_kernel(one, device), run_kernel(other, device, config=StepConfig(tile, 1))
    within = 1e-6 if device.type == "cuda" else 0
    torch.testing.assert_close(*y, rtol=within, atol=within)
    for row in case.counts.rows.tolist():
        torch.testing.assert_close(one.rows.state[row], other.rows.state[row], rtol=within, atol=within)
        assert torch.equal(one.rows.tail[row], other.rows.tail[row])


def test_a_request_does_not_see_its_batch_or_its_drafts(device: torch.device) -> None:
    """Bit for bit: a token gives the same when it is known, a draft, or folded in the step after."""
    case = make_case([Asked(2), Asked(1, 3, 2)], num_padded=1, padded_tokens=2)
    together = case.copy()
    y = run_kernel(together, device)
    alone = Case(case.mixer, make_case([Asked(4, 0, 2)]).counts, case.rows, case.conv_in[2:6],
                 tuple(gate[2:6] for gate in case.gates), case.pool, case.kind).copy()
    row = case.counts.rows[1:2]
    object.__setattr__(alone.counts, "rows", row)
    assert torch.equal(run_kernel(alone, device), y[2:6]), "one by one or as drafts"
    after = Case(case.mixer, make_case([Asked(1, 0, 3)]).counts, together.rows, case.conv_in[:1],
                 tuple(gate[:1] for gate in case.gates), case.pool, case.kind)
    object.__setattr__(after.counts, "rows", row)
    run_kernel(after, device)
    more = Case(case.mixer, make_case([Asked(1)]).counts, alone.rows, case.conv_in[:1],
                tuple(gate[:1] for gate in case.gates), case.pool, case.kind)
    object.__setattr__(more.counts, "rows", row)
    run_kernel(more, device)
    assert torch.equal(after.rows.state[row], more.rows.state[row]), "folded or known"
    assert torch.equal(after.rows.tail[row], more.rows.tail[row])


def test_rows_that_ended_are_folded_into_their_checkpoint(device: torch.device) -> None:
    asked = [Asked(0, 0, 3, boundaries=(2,)), Asked(0, 0, 1, boundaries=(1,)), Asked(0, 0, 2, boundaries=(3,))]
    case = make_case(asked)
    found, wanted, counts = case.copy(), case.wide(), case.counts
    assert counts.targets is not None
    y = run_kernel(found, device, fold_only=True)
    assert y.shape == (0, case.mixer.spec.out_dim)
    pages = CheckpointPages(wanted.kind, wanted.pool, torch.float64)
    layers = TorchRecurrent({LAYER: wanted.mixer}, {LAYER: wanted.rows}, pages)
    layers.fold_ended(counts.rows, counts.computed, counts.pending, counts.targets)
    assert_close(saved_states(found), saved_states(wanted), "checkpoints")
    assert saved_states(found).isnan().flatten(1).all(1).tolist() == [False, False, True]
    for own, was in ((found.rows.state, case.rows.state), (found.rows.tail, case.rows.tail)):
        assert torch.equal(own.nan_to_num(nan=7.0), was.nan_to_num(nan=7.0))


def test_strong_decays_and_repeated_keys_stay_accurate(device: torch.device) -> None:
    """Keys that are all alike and corrections that are whole: powers of the system's matrix grow, its inverse does
    not. Decays from none at all to all of it, side by side."""
    case = make_case([Asked(64, seen=0)])
    key_size = SMALL.key_size
    case.conv_in[:, :key_size] *= 0.01
    case.conv_in[:, key_size : 2 * key_size] = case.conv_in[:1, key_size : 2 * key_size].abs() + 1
    case.mixer.conv_weight.abs_()
    case.gates[0][::5] = 60.0
    case.gates[0][1::5] = -30.0
    case.gates[1][:] = 12.0
    wide = case.wide()
    wide.mixer.conv_weight.copy_(case.mixer.conv_weight)
    wanted = run_torch(wide)
    for chunk in (16, 32):
        found = case.copy()
        assert_close(run_kernel(found, device, chunked=True, chunks=ChunkConfig(chunk)), wanted, "y")
        assert_close(found.rows.state, wide.rows.state, "state")


def test_wrappers_name_what_is_wrong(device: torch.device) -> None:
    case = make_case([Asked(1)])
    wrong = {"chunks": ChunkConfig(24), "num_key_heads": 3}
    for argument, value in wrong.items():
        with pytest.raises(ValueError, match=f"delta_steps: {argument} "):
            run_kernel(case, device, **{argument: value})
    with pytest.raises(ValueError, match="delta_steps: inputs.conv_in "):
        run_kernel(case, device, num_key_heads=2)
