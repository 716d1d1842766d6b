"""Recurrent layers over a ragged batch: fold, known tokens, store, drafts. Plain torch, any device, the reference; on a
GPU kernels do the same (`recurrent_kernels.py`).

    row's state   | accepted drafts of the last step | known tokens | drafts of this step
    covers        | folded from the row's window     | applied      | run, not stored: their inputs are the new window
    tokens < c-a  | c-a ... c-1                      | c ... c+n-1  | c+n ...
                                                         state stored ^

There are no modes: prefill chunks, one-token prompts, decoding with and without drafts are this one thing. Requests
with few known tokens go together, longer ones one by one through the mixer's scan. Whatever is masked is selected away
and never multiplied by zero: rows may hold NaN. Dead, padded and absent rows keep all they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from outrider.kernels import ops
from outrider.kernels.recurrent import SHORT_RUN
from outrider.mixers.recurrent.base import Gates, RecurrentLayer, RecurrentMixer, RecurrentState
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages


@dataclass(frozen=True)
class LayerRows:
    """What every row keeps of one recurrent layer."""

    state: torch.Tensor  # [ROWS, *state_shape]
    tail: torch.Tensor  # [ROWS, conv_width - 1, conv_dim]
    conv_in: torch.Tensor  # [ROWS, DRAFTS, conv_dim] window: inputs of the drafts of the row's last step
    gates: Gates  # [ROWS, DRAFTS, n] each


@dataclass(frozen=True)
class Targets:
    """Checkpoints that a step may write, [checkpoints] each."""

    requests: tuple[int, ...]  # index in the batch
    offsets: tuple[int, ...]  # known tokens of the step before the boundary, if the row is where the host thinks
    request: torch.Tensor
    boundary: torch.Tensor
    start: torch.Tensor  # computed tokens as the host thinks, where the row must be there; -1 where it need not
    pages: torch.Tensor  # [checkpoints, pages]
    order: torch.Tensor | None = None  # which sorts them by request, where they are not


@dataclass(frozen=True)
class StepCounts:
    """A batch as recurrent layers see it: a request's known tokens, then its drafts, from its query start on."""

    rows: torch.Tensor  # [requests]
    query_starts: torch.Tensor  # [requests + 1]
    request_of: torch.Tensor  # [tokens]
    computed: torch.Tensor  # [requests] when the step begins
    num_known: torch.Tensor  # [requests] live ones: all that were scheduled, or none
    num_drafts: torch.Tensor  # [requests] live ones
    pending: torch.Tensor  # [requests] accepted drafts to fold
    query_lens: tuple[int, ...]  # as scheduled
    known_lens: tuple[int, ...]  # as scheduled
    most_drafts: int
    most_pending: int
    targets: Targets | None = None

    def written(self, targets: Targets) -> torch.Tensor:
        """[checkpoints] whether the state to be stored has passed the boundary, and the one before had not."""
        request, boundary = targets.request, targets.boundary
        computed = self.computed[request]
        has_passed = (boundary > computed - self.pending[request]) & (boundary <= computed + self.num_known[request])
        is_seen = (boundary <= computed) | (targets.start < 0) | (targets.start == computed)
        return (self.num_known[request] > 0) & has_passed & is_seen


class RecurrentLayers:
    """A model's mixers with their rows and checkpoint pages. `on(counts)` is what a step calls. use_kernels: decided
    by the device and the mixers, unless said."""

    def __init__(self, mixers: Mapping[int, RecurrentMixer], rows: Mapping[int, LayerRows], pages: CheckpointPages, *,
                 exact: bool = False, use_kernels: bool | None = None) -> None:
        self.mixers, self.rows, self.pages, self.exact = mixers, rows, pages, exact
        self.use_kernels = can_use_kernels(mixers, rows, pages) if use_kernels is None else use_kernels

    def on(self, counts: StepCounts) -> RecurrentStep:
        return RecurrentStep(self, counts)

    def fold_ended(self, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor, targets: Targets) -> None:
        """Rows [targets] that take no further step: their pending drafts are applied up to the boundary. Stores
        nothing but the checkpoints."""
        if self.use_kernels:
            from outrider.mixers.recurrent.kernels import KernelStep

            written = (targets.boundary > computed - pending) & (targets.boundary <= computed)
            step = KernelStep.of_ended(rows, computed, pending, targets, written, self.pages)
            for layer, own in self.rows.items():
                nothing = tuple(window.new_empty(0, window.shape[2]) for window in (own.conv_in, *own.gates))
                step(layer, self.mixers[layer], own, nothing[0], nothing[1:])
            return
        for layer, mixer in self.mixers.items():
            own = self.rows[layer]
            walk = Walk(mixer, RecurrentState(own.state[rows], own.tail[rows]), computed - pending, targets)
            for j in range(own.conv_in.shape[1]):
                walk.step(own.conv_in[rows, j], tuple(gate[rows, j] for gate in own.gates), j < pending)
            self.pages.write(layer, walk.saved, targets.pages, walk.has_saved)


class Walk:
    """States of several requests on their way over tokens, and what they are at the boundaries of checkpoints."""

    def __init__(self, mixer: RecurrentMixer, begin: RecurrentState, at: torch.Tensor, targets: Targets | None) -> None:
        self.mixer, self.targets = mixer, targets
        self.state, self.tail = begin
        self.at = at  # [requests] tokens seen
        count = 0 if targets is None else len(targets.requests)
        self.saved = RecurrentState(*(part.new_zeros(count, *part.shape[1:]) for part in begin))
        self.has_saved = torch.zeros(count, dtype=torch.bool, device=at.device)

    def step(self, conv_in: torch.Tensor, gates: Gates, moves: torch.Tensor) -> torch.Tensor:
        """One token of those requests that move [requests]; y of all."""
        y, state, tail = self.mixer.step(self.state, self.tail, conv_in, gates)
        self.state, self.tail = selected(moves, state, self.state), selected(moves, tail, self.tail)
        self.at = self.at + moves
        if self.targets is not None:
            request = self.targets.request
            is_there = moves[request] & (self.at[request] == self.targets.boundary)
            self._save(slice(None), is_there, RecurrentState(self.state[request], self.tail[request]))
        return y

    def scan(self, request: int, conv_in: torch.Tensor, gates: Gates, moves: torch.Tensor, *,
             exact: bool) -> torch.Tensor:
        """Many tokens of one request, if it moves []; its y."""
        count, targets = conv_in.shape[0], self.targets
        mine = [] if targets is None else sorted(
            (offset, i) for i, (owner, offset) in enumerate(zip(targets.requests, targets.offsets, strict=True))
            if owner == request and 0 < offset <= count
        )  # fmt: skip
        done = self.mixer.scan(self.state[request], self.tail[request], conv_in, gates, [o for o, _ in mine], exact)
        for (offset, i), at_boundary in zip(mine, done.states_at, strict=True):
            assert targets is not None
            is_there = moves & (self.at[request] + offset == targets.boundary[i])
            one = RecurrentState(at_boundary.state[None], at_boundary.tail[None])
            self._save(slice(i, i + 1), is_there[None], one)
        self.state[request] = torch.where(moves, done.state, self.state[request])
        self.tail[request] = torch.where(moves, done.tail, self.tail[request])
        self.at = self.at.index_add(0, torch.full_like(self.at[:1], request), count * moves.to(self.at.dtype)[None])
        return done.y

    def _save(self, which: slice, is_there: torch.Tensor, now: RecurrentState) -> None:
        for saved, part in zip(self.saved, now, strict=True):
            saved[which] = selected(is_there, part, saved[which])
        self.has_saved[which] |= is_there


class RecurrentStep:
    """One step of a batch, layer by layer."""

    def __init__(self, layers: RecurrentLayers, counts: StepCounts) -> None:
        self._layers, self.counts = layers, counts
        self.written = None if counts.targets is None else counts.written(counts.targets)  # [checkpoints]
        self._kernels = None
        if layers.use_kernels:
            from outrider.mixers.recurrent.kernels import KernelStep

            self._kernels = KernelStep.of(counts, self.written, layers.pages, exact=layers.exact)
            return
        self._is_live = counts.num_known > 0
        self._starts = counts.query_starts[:-1]
        self._long = [i for i, n in enumerate(counts.known_lens) if n > SHORT_RUN]
        self._most_short = max((n for n in counts.known_lens if n <= SHORT_RUN), default=0)
        host_starts = list(accumulate(counts.query_lens, initial=0))
        self._spans = [(i, slice(host_starts[i], host_starts[i] + counts.known_lens[i])) for i in self._long]
        # [requests] known tokens that go with everyone's, one by one.
        lens = torch.where(self._is_live, counts.num_known, 0)
        self._short_lens = torch.where(lens <= SHORT_RUN, lens, 0)

    def bind(self) -> dict[int, RecurrentLayer]:
        return {layer: partial(self, layer) for layer in self._layers.mixers}

    def __call__(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        """conv_in [tokens, conv_dim], gates [tokens, n] each. Returns [tokens, out_dim]; 0 for dead and padded ones."""
        counts, rows, mixer = self.counts, self._layers.rows[layer], self._layers.mixers[layer]
        if self._kernels is not None:
            return self._kernels(layer, mixer, rows, conv_in, gates)
        at_row = counts.rows
        walk = Walk(mixer, RecurrentState(rows.state[at_row], rows.tail[at_row]), counts.computed - counts.pending,
                    counts.targets)
        # One row more than there are tokens: where what must not be seen goes.
        out = conv_in.new_zeros(conv_in.shape[0] + 1, mixer.spec.out_dim)
        for j in range(counts.most_pending):
            walk.step(rows.conv_in[at_row, j], tuple(gate[at_row, j] for gate in rows.gates),
                      self._is_live & (j < counts.pending))
        for j in range(self._most_short):
            self._step(walk, out, conv_in, gates, self._starts + j, j < self._short_lens)
        for request, span in self._spans:
            moves = self._is_live[request]
            y = walk.scan(request, conv_in[span], tuple(gate[span] for gate in gates), moves, exact=self._layers.exact)
            out[span] = torch.where(moves, y, 0)
        rows.state.index_copy_(0, at_row, walk.state)  # those that did not move write back what they hold
        rows.tail.index_copy_(0, at_row, walk.tail)
        if counts.targets is not None:
            self._layers.pages.write(layer, walk.saved, counts.targets.pages, walk.has_saved)
            walk.targets = None  # drafts never reach a checkpoint
        drafts = self._starts + counts.num_known
        for j in range(counts.most_drafts):
            self._step(walk, out, conv_in, gates, drafts + j, j < counts.num_drafts)
        self._keep_window(rows, conv_in, gates)
        return out[:-1]

    def _step(self, walk: Walk, out: torch.Tensor, conv_in: torch.Tensor, gates: Gates, token_rows: torch.Tensor,
              moves: torch.Tensor) -> None:
        """One token of every request that moves, at these token rows."""
        dump = out.shape[0] - 1
        source = token_rows.clamp_max(dump - 1)
        y = walk.step(conv_in[source], tuple(gate[source] for gate in gates), moves)
        out.index_copy_(0, torch.where(moves, token_rows, dump), selected(moves, y, torch.zeros_like(y)))

    def _keep_window(self, rows: LayerRows, conv_in: torch.Tensor, gates: Gates) -> None:
        """The drafts' inputs, before the convolution. A row that ended keeps those it has: they wait to be folded."""
        counts, width = self.counts, self.counts.most_drafts
        if width == 0:
            return
        index = torch.arange(width, device=conv_in.device)
        source = ((self._starts + counts.num_known)[:, None] + index).clamp_max(conv_in.shape[0] - 1)
        for window, inputs in zip((rows.conv_in, *rows.gates), (conv_in, *gates), strict=True):
            kept = window[counts.rows][:, :width]
            fresh = selected(self._is_live, inputs[source].to(window.dtype), kept)
            window[:, :width].index_copy_(0, counts.rows, fresh)


def can_use_kernels(mixers: Mapping[int, RecurrentMixer], rows: Mapping[int, LayerRows],
                    pages: CheckpointPages) -> bool:
    """On a GPU, in types and for mixers that have kernels, with states at whole words of a checkpoint's pages."""
    if pages.pool.device.type != "cuda" or pages.pool.dtype == torch.float64 or not ops.has_triton():
        return False
    starts_whole = all(start % 4 == 0 for start in (pages.page_bytes, *pages.starts.values()))
    return starts_whole and all(mixers[layer].kernel_params() is not None for layer in rows)


def selected(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """new where mask [n], old elsewhere; both [n, ..]."""
    return torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old)
