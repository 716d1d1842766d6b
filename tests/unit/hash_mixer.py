"""HashMixerRunner: a device in plain Python whose cache holds a hash of each row's history.

It plays a step as the real one does (rows, admissions, page writes, clears, dead tokens, acceptance, ends) and checks
every cell that attention could see: a wrong, missing, stale or repeated token shows at once. Rows also have a recurrent
state, a hash too, that folds, is saved and is restored as the real one; and in groups of a drafter alone a valid range,
since hits do not wait for these. It does not know the scheduler or the cache manager, only the batches they make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from outrider.cache.groups import CacheLayout, Group
from outrider.cache.kinds import ChunkedSpec, FullSpec, RecurrentKind, RecurrentSpec, SlidingSpec
from outrider.core import (
    NULL_PAGE,
    NULL_ROW,
    Admission,
    CheckpointWrite,
    Finish,
    HostDraft,
    Limits,
    RequestResult,
    ScheduledBatch,
    StepResult,
)

VOCAB = 7
STOP_ID = 0
SALTS = ("", "other")
POISON, CLEARED, GUESS = -1, -2, -3  # no history hashes to these
NOT_FINITE = -1000  # the value of a token that a failing request computed, and of everything made from it


def mix(*values: int) -> int:
    return hash(values) & (2**60 - 1)


def salt_of(seed: int) -> str:
    """A request's salt goes with its seed, since the device is told only the latter."""
    return SALTS[seed % len(SALTS)]


def state_before(seed: int) -> int:
    """The state before the first token."""
    return mix(seed % len(SALTS))


def chain(seed: int, tokens: Sequence[int], start: Sequence[int] = ()) -> list[int]:
    """A hash per token of everything up to it, the salt included; `start` are the first ones."""
    hashes = list(start)
    last = hashes[-1] if hashes else state_before(seed)
    for token in tokens[len(hashes) :]:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def next_token(history: int, seed: int) -> int:
    return mix(history, seed, 1) % VOCAB


def reference(prompt: Sequence[int], seed: int, end_len: int, stop_ids: Sequence[int]) -> tuple[list[int], Finish]:
    """What one request yields alone, by definition, and why it ends."""
    tokens = list(prompt)
    hashes = chain(seed, tokens)
    while True:
        tokens.append(next_token(hashes[-1], seed))
        hashes = chain(seed, tokens, hashes)
        if tokens[-1] in stop_ids:
            return tokens[len(prompt) :], Finish.STOP
        if len(tokens) >= end_len:
            return tokens[len(prompt) :], Finish.LENGTH


def guess_after(seed: int, tokens: Sequence[int], count: int, right: float, rng: Random) -> list[int]:
    """What follows the tokens, each guess wrong with probability 1 - right."""
    guess: list[int] = []
    last = chain(seed, tokens)[-1]
    for _ in range(count):
        token = next_token(last, seed)
        if rng.random() >= right:
            token = (token + 1) % VOCAB
        guess.append(token)
        last = mix(last, token)
    return guess


def make_layout(*groups: tuple[int, int], state_pages: int = 0, interval: int = 8, num_drafter: int = 0) -> CacheLayout:
    """Groups as (tokens per page, window): 0 is a full group, a negative window a chunk. `state_pages`: of a checkpoint
    of the recurrent layer, if there is to be one. `num_drafter`: the last so many groups hold only layers of a
    drafter."""
    made = []
    for index, (page_tokens, window) in enumerate(groups):
        spec = SlidingSpec(1, 1, 1, window) if window > 0 else FullSpec(1, 1, 1)
        if window < 0:
            spec = ChunkedSpec(1, 1, 1, -window)
        made.append(Group(index, spec, (index,), 1, page_tokens, is_target=index < len(groups) - num_drafter))
    page_bytes = 2 * max(g.page_tokens for g in made)  # 2 bytes a slot
    spec = RecurrentSpec(0, 1, (state_pages * page_bytes // 4,), (), 1, 1)  # 4 bytes each
    layers = ((len(made), spec),) if state_pages else ()
    size = max(g.page_tokens for g in made if g.is_target)
    kind = RecurrentKind(layers, size, page_bytes, -(-interval // size) * size)
    return CacheLayout(tuple(made), {i: (i, 0) for i in range(len(made))}, page_bytes, kind)


def first_visible(group: Group, position: int) -> int:
    """The first position that a query sees."""
    match group.spec:
        case ChunkedSpec(window=chunk):
            return position // chunk * chunk
        case SlidingSpec(window=window):
            return max(0, position - window + 1)
    return 0


@dataclass(slots=True)
class Row:
    """What the device knows of one request."""

    tokens: list[int]
    hashes: list[int]  # of the known tokens
    computed: int
    end_len: int
    stop_ids: tuple[int, ...]
    seed: int
    state: int  # recurrent: has seen `computed - pending` tokens
    alive: bool = True
    drafts: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)  # the drafts of the row's last step
    pending: int = 0  # of these, accepted and not folded
    valid_from: dict[int, int] = field(default_factory=dict)  # by group of a drafter alone: slots before it are missing


@dataclass(frozen=True, slots=True)
class Live:
    """The live part of one request in a step."""

    row: int
    state: Row
    num_known: int
    drafts: list[int]
    hashes: list[int]  # of known tokens and drafts
    samples: bool

    @property
    def length(self) -> int:
        return self.state.computed + self.num_known + len(self.drafts)


@dataclass
class Seen:
    """What occurred on the device."""

    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)  # (live drafts, accepted)
    num_dead_tokens: int = 0
    num_cleared_pages: int = 0
    num_host_drafts: int = 0
    num_steps_of_ended: int = 0  # requests scheduled after they ended on the device
    num_restored: int = 0
    num_without_drafter: int = 0  # hits of which a drafter's group has only a part
    num_within_pages: int = 0  # hits that end within a page of a drafter's group
    num_folds: int = 0
    written: Counter[str] = field(default_factory=Counter)  # checkpoints by where the boundary lay


class HashMixerRunner:
    def __init__(self, groups: Sequence[Group], num_pages: int, limits: Limits, rng: Random, *,
                 lookahead: int = 0, right: float = 0.7, has_state: bool = False) -> None:
        self.groups, self.limits, self._has_state = groups, limits, has_state
        self.rows: dict[int, Row] = {}
        self.seen = Seen()
        self.failing: set[int] = set()  # requests whose values are not finite in every step that samples for them
        self._bad: set[int] = set()  # rows of the running step with such values
        self._rng, self._lookahead, self._right = rng, lookahead, right
        widest = max(group.page_tokens for group in groups)
        self._cells = [[POISON] * widest for _ in range(num_pages)]
        self._group_of = [-1] * num_pages
        self._is_filled = [False] * num_pages  # of a drafter's pages: every slot was, when the last one was
        self._tables = [
            [[NULL_PAGE] * group.kind.capacity(limits).table_width for _ in range(limits.max_requests + 1)]
            for group in groups
        ]

    def step(self, batch: ScheduledBatch, blank_pages: Sequence[int]) -> StepResult:
        """`blank_pages`: pages without content when the batch was made. Whoever reads one is wrong."""
        self._check_batch(batch)
        for page in blank_pages:
            self._fill(page, POISON)
        folded = [self._fold_ended(fold) for fold in batch.cache.folds]
        self._apply_host_writes(batch)
        lives = [self._live(batch, i) for i in range(batch.num_requests)]
        self._forward(batch, lives)
        written = [*folded, *self._advance_states(batch, lives)]
        results = [self._finish(batch, i, live) for i, live in enumerate(lives)]
        return StepResult(batch.step, results, checkpoints=written)

    # Before the step

    def _check_batch(self, batch: ScheduledBatch) -> None:
        if not batch.rows:
            orders = batch.cache
            assert orders.folds or orders.pages.moves, "a batch without anything to do"
            assert not batch.admissions and not orders.checkpoints
            return
        assert 0 < batch.num_tokens <= self.limits.max_batched_tokens, "batch over the token budget"
        assert len(set(batch.rows)) == batch.num_requests <= self.limits.max_requests, "a row is in the batch twice"
        assert NULL_ROW not in batch.rows
        assert min(batch.num_known) >= 1 and 0 <= min(batch.num_drafts), "a request without a known token"
        assert max(batch.num_drafts) <= self.limits.max_drafts
        assert max(batch.bounds) <= self.limits.max_len, "a bound beyond the longest request"

    def _apply_host_writes(self, batch: ScheduledBatch) -> None:
        for page in batch.cache.pages.cleared:
            self.seen.num_cleared_pages += 1
            self._fill(page, CLEARED)
            self._group_of[page] = -1
        for admission in batch.admissions:
            self._admit(admission)
        for write in batch.cache.pages.table_writes:
            table = self._tables[write.group][write.row]
            assert write.start + len(write.pages) <= len(table), "a write beyond the page table"
            table[write.start : write.start + len(write.pages)] = write.pages
            for page in write.pages:
                if page != NULL_PAGE:
                    assert self._group_of[page] in (-1, write.group), f"page {page} shows another group's bytes"
                    self._group_of[page] = write.group
        for admission in batch.admissions:
            self._find_valid(admission)
        for draft in batch.drafting.from_host:
            self._take_host_draft(draft)

    def _admit(self, admission: Admission) -> None:
        tokens = list(admission.token_ids)
        assert 0 <= admission.computed < len(tokens) < admission.max_len, "nothing to compute, or no room to sample"
        hashes = chain(admission.request.seed, tokens)
        self.rows[admission.row] = Row(
            tokens, hashes, admission.computed, admission.max_len, admission.eos_ids, admission.request.seed,
            self._restored(admission),
        )

    def _find_valid(self, admission: Admission) -> None:
        """What of the hit the drafter's groups have: all behind the last page that is missing or was not filled."""
        hit = admission.computed
        for group in self.groups:
            if group.is_target:
                continue
            table, size = self._tables[group.index][admission.row], group.page_tokens
            columns = range(group.kind.first_needed(hit), hit // size)
            broken = [c for c in columns if table[c] == NULL_PAGE or not self._is_filled[table[c]]]
            self.seen.num_without_drafter += bool(broken)
            self.seen.num_within_pages += hit % size > 0
            after = (broken[-1] + 1) * size if broken else 0
            self.rows[admission.row].valid_from[group.index] = hit if hit % size else after

    def _take_host_draft(self, draft: HostDraft) -> None:
        """What was accepted since it was made is dropped from it, if it agrees."""
        state = self.rows[draft.row]
        since = state.tokens[draft.after :]
        is_alive = draft.after <= len(state.tokens) and since == draft.token_ids[: len(since)]
        state.drafts = draft.token_ids[len(since) :][: self.limits.max_drafts] if is_alive else []
        self.seen.num_host_drafts += len(state.drafts)

    def _fill(self, page: int, value: int) -> None:
        cells = self._cells[page]
        cells[:] = [value] * len(cells)

    # Forward

    def _live(self, batch: ScheduledBatch, i: int) -> Live | None:
        """None for a request that has ended while the host ran ahead."""
        state = self.rows[batch.rows[i]]
        if not state.alive:
            self.seen.num_dead_tokens += batch.num_known[i] + batch.num_drafts[i]
            self.seen.num_steps_of_ended += 1
            return None
        known, reached = len(state.tokens), state.computed + batch.num_known[i]
        assert reached <= known, "unknown tokens are scheduled as known"
        assert (reached == known) == batch.samples[i], "the host is wrong about the last known token"
        drafts: list[int] = []
        if batch.samples[i]:
            room = max(0, state.end_len - known - 1)
            drafts = state.drafts[: min(batch.num_drafts[i], room)]
        self.seen.num_dead_tokens += batch.num_drafts[i] - len(drafts)
        hashes = chain(state.seed, [*state.tokens, *drafts], state.hashes)
        return Live(batch.rows[i], state, batch.num_known[i], drafts, hashes, batch.samples[i])

    def _forward(self, batch: ScheduledBatch, lives: list[Live | None]) -> None:
        """Write and read the cells of all requests. Values that are not finite spread to every request that reads
        them, in the same step too."""
        alive = [live for live in lives if live is not None]
        self._bad = {live.row for i, live in enumerate(lives) if live is not None
                     and (live.state.state == NOT_FINITE or live.samples and batch.request_ids[i] in self.failing)}
        while True:
            num_bad = len(self._bad)
            self._write(alive)
            for live in alive:
                self._read(live)
            if len(self._bad) == num_bad:
                return

    def _write(self, lives: list[Live]) -> None:
        written: set[tuple[int, int]] = set()
        for live in lives:
            for group, tables in zip(self.groups, self._tables, strict=True):
                table = tables[live.row]
                for position in range(live.state.computed, live.length):
                    page, slot = table[position // group.page_tokens], position % group.page_tokens
                    assert page != NULL_PAGE, f"group {group.index}: no page for position {position}"
                    assert self._group_of[page] == group.index, f"page {page} is in two groups"
                    assert (page, slot) not in written, f"slot {slot} of page {page} has two writers"
                    written.add((page, slot))
                    self._cells[page][slot] = NOT_FINITE if live.row in self._bad else live.hashes[position]

    def _read(self, live: Live) -> None:
        """Every cell that some live query of the request may see."""
        for group, tables in zip(self.groups, self._tables, strict=True):
            size = group.page_tokens
            begin = max(first_visible(group, live.state.computed), live.state.valid_from.get(group.index, 0))
            for column in range(begin // size, -(-live.length // size)):
                page = tables[live.row][column]
                low, high = max(begin, column * size), min(live.length, (column + 1) * size)
                found = self._cells[page][low - column * size : high - column * size]
                assert page != NULL_PAGE, f"group {group.index}: no page for position {low}"
                if NOT_FINITE in found:
                    self._bad.add(live.row)
                    return
                assert found == live.hashes[low:high], f"group {group.index}: position {low} and on hold {found}"

    # Recurrent states

    def _restored(self, admission: Admission) -> int:
        if not admission.checkpoint:
            return state_before(admission.request.seed)
        assert admission.computed > 0, "a state of no tokens is restored"
        self.seen.num_restored += 1
        if self._cells[admission.checkpoint[0]][0] == NOT_FINITE:
            return NOT_FINITE
        states = {self._cells[page][0] - i for i, page in enumerate(admission.checkpoint)}
        assert len(states) == 1, f"pages of different checkpoints: {states}"
        return states.pop()

    def _advance_states(self, batch: ScheduledBatch, lives: list[Live | None]) -> list[int]:
        """Fold, apply the known tokens, store; drafts are only kept. Returns the checkpoints written."""
        if not self._has_state:
            assert not batch.cache.checkpoints and not batch.cache.folds
            return []
        written: list[int] = []
        targets: dict[int, list[CheckpointWrite]] = {}
        for write in batch.cache.checkpoints:
            assert write.row in batch.rows, "a checkpoint of a row that is not in the batch"
            targets.setdefault(write.row, []).append(write)
        for i, live in enumerate(lives):
            if live is None:
                continue
            state = live.state
            assert state.pending <= batch.cache.num_pending[i], "more drafts wait to be folded than the host thinks"
            known = state.tokens[state.computed : state.computed + live.num_known]
            if live.row in self._bad:
                state.state = NOT_FINITE
            written += self._walk(state, known, targets.get(live.row, []))
            if live.row not in self._bad:
                last = live.hashes[state.computed + live.num_known - 1]
                assert state.state == last, "the recurrent state is wrong"
            state.window = list(live.drafts)
        return written

    def _walk(self, state: Row, known: Sequence[int], targets: Sequence[CheckpointWrite]) -> list[int]:
        """The state over its pending drafts and known tokens, saved where asked."""
        inputs = [*state.window[: state.pending], *known]
        at = state.computed - state.pending
        written: list[int] = []
        for index, token in enumerate(inputs, start=1):
            state.state = NOT_FINITE if state.state == NOT_FINITE else mix(state.state, token)
            for write in targets:
                if write.boundary == at + index:
                    self._save(write, state.state)
                    written.append(write.id)
                    self.seen.written["folding" if index <= state.pending else "known"] += 1
        state.window, state.pending = [], 0
        return written

    def _save(self, write: CheckpointWrite, value: int) -> None:
        for i, page in enumerate(write.pages):
            assert page != NULL_PAGE
            self._fill(page, value + i)
            self._group_of[page] = len(self.groups)

    def _fold_ended(self, fold: CheckpointWrite) -> int:
        state = self.rows[fold.row]
        self.seen.num_folds += 1
        assert state.computed - state.pending < fold.boundary <= state.computed, "nothing to fold at this boundary"
        (written,) = self._walk(state, (), [fold])
        return written

    # Finish and draft

    def _finish(self, batch: ScheduledBatch, i: int, live: Live | None) -> RequestResult:
        request_id, epoch = batch.request_ids[i], batch.epochs[i]
        if live is None:
            return RequestResult(request_id, epoch, [], 0, 0, 0)
        state = live.state
        if live.row in self._bad and live.samples:
            state.alive = False
            return RequestResult(request_id, epoch, [], 0, 0, 0, finish=Finish.ERROR, error="not finite")
        run, accepted, finish = self._accept(live)
        computed = live.num_known + accepted
        state.tokens += run
        state.hashes = chain(state.seed, state.tokens, live.hashes[: len(state.tokens) - len(run) + accepted])
        self._complete_pages(live, computed)
        state.computed += computed
        state.pending = accepted
        state.alive = finish is Finish.NO
        assert state.computed <= batch.bounds[i], "more tokens computed than the bound"
        # Drafts are all that can make a bound an estimate.
        assert self.limits.max_drafts or state.computed == batch.bounds[i], "fewer tokens computed than the bound"
        state.drafts = []
        if run and state.alive:
            count = self._rng.randint(0, batch.drafting.num_wanted)
            state.drafts = guess_after(state.seed, state.tokens, count, self._right, self._rng)
        self._write_guesses(live.row, state)
        if live.samples:
            self.seen.acceptance[len(live.drafts), accepted] += 1
        return RequestResult(
            request_id, epoch, run, computed, len(live.drafts), accepted, len(state.drafts), finish=finish
        )

    def _accept(self, live: Live) -> tuple[list[int], int, Finish]:
        if not live.samples:
            return [], 0, Finish.NO
        state, known = live.state, len(live.state.tokens)
        run: list[int] = []
        for index in range(len(live.drafts) + 1):
            run.append(next_token(live.hashes[known - 1 + index], state.seed))
            if run[-1] in state.stop_ids:
                return run, len(run) - 1, Finish.STOP
            if known + len(run) >= state.end_len:
                return run, len(run) - 1, Finish.LENGTH
            if index < len(live.drafts) and live.drafts[index] != run[-1]:
                break
        return run, len(run) - 1, Finish.NO

    def _complete_pages(self, live: Live, computed: int) -> None:
        """Mark the pages of the drafter's groups whose last token the step computed."""
        for group in self.groups:
            valid_from = live.state.valid_from.get(group.index)
            if valid_from is not None:
                size, begin = group.page_tokens, live.state.computed
                for column in range(begin // size, (begin + computed) // size):
                    self._is_filled[self._tables[group.index][live.row][column]] = valid_from <= column * size

    def _write_guesses(self, row: int, state: Row) -> None:
        """A drafter with layers fills slots past the computed tokens; they must be the row's own."""
        for group, tables in zip(self.groups, self._tables, strict=True):
            for position in range(state.computed, min(state.computed + self._lookahead, self.limits.max_len)):
                page = tables[row][position // group.page_tokens]
                assert page != NULL_PAGE and self._group_of[page] == group.index, "no page for the drafter's slot"
                self._cells[page][position % group.page_tokens] = GUESS
