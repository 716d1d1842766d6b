"""The torch backend of recurrent layers over a ragged batch, for any device. It is the reference of the kernels in
`triton_backend.py`. A step folds accepted drafts, computes known tokens, stores the state and computes drafts.

    row's state   | accepted drafts of the last step | known tokens | drafts of this step
    covers        | folded from the row's window     | applied      | run, not stored: their inputs are the new window
    tokens < c-a  | c-a ... c-1                      | c ... c+n-1  | c+n ...
                                                         state stored ^

There are no modes: prefill chunks, one-token prompts, decoding with and without drafts all follow this picture.
Requests with few known tokens are computed together, longer ones one by one through the mixer's scan. Masked values are
selected away and never multiplied by zero, because rows may hold NaN. Dead, padded and absent rows keep their state.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from outrider.kernels.recurrent import SHORT_RUN, CheckpointTargets
from outrider.mixers.recurrent.checkpoint_pages import RecurrentState
from outrider.mixers.recurrent.recurrent_mixer import (
    Gates,
    LayerRows,
    RecurrentBackend,
    RecurrentMixer,
    RecurrentStep,
    StepCounts,
    StepOutput,
)


class TorchRecurrent(RecurrentBackend):
    scan_from_tokens = SHORT_RUN + 1
    finds_runs = False

    def begin(self, counts: StepCounts) -> TorchStep:
        return TorchStep(self, counts)

    def fold_ended(self, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor,
                   targets: CheckpointTargets) -> None:
        for layer, mixer in self.mixers.items():
            own = self.rows[layer]
            walk = Walk(mixer, RecurrentState(own.state[rows], own.tail[rows]), computed - pending, targets,
                        exact=self.exact)
            for j in range(own.conv_in.shape[1]):
                walk.step(own.conv_in[rows, j], tuple(gate[rows, j] for gate in own.gates), j < pending)
            self.pages.write(layer, walk.saved, targets.pages, walk.has_saved)


class Walk:
    """Advances the states of several requests token by token, and saves them at the boundaries of checkpoints."""

    def __init__(self, mixer: RecurrentMixer, begin: RecurrentState, at: torch.Tensor,
                 targets: CheckpointTargets | None, *, exact: bool) -> None:
        """exact: call libraries with the same shapes for any number of requests, so that bits cannot depend on it."""
        self.mixer, self.targets, self.exact = mixer, targets, exact
        self.state, self.tail = begin
        self.at = at  # [requests] tokens seen
        count = 0 if targets is None else len(targets.boundary)
        self.saved = RecurrentState(*(part.new_zeros(count, *part.shape[1:]) for part in begin))
        self.has_saved = torch.zeros(count, dtype=torch.bool, device=at.device)

    def step(self, conv_in: torch.Tensor, gates: Gates, moves: torch.Tensor) -> torch.Tensor:
        """Advance by one token the requests for which `moves` [requests] is True. Returns y of all requests."""
        y, state, tail = self._step_each(conv_in, gates) if self.exact else self.mixer.step(
            self.state, self.tail, conv_in, gates)
        self.state, self.tail = selected(moves, state, self.state), selected(moves, tail, self.tail)
        self.at = self.at + moves
        if self.targets is not None:
            request = self.targets.request
            is_there = moves[request] & (self.at[request] == self.targets.boundary)
            self._save(slice(None), is_there, RecurrentState(self.state[request], self.tail[request]))
        return y

    def _step_each(self, conv_in: torch.Tensor, gates: Gates) -> StepOutput:
        each = zip(self.state.split(1), self.tail.split(1), conv_in.split(1), strict=True)
        # Gates are copied: a library may look at where a row lies in memory.
        done = [self.mixer.step(state, tail, inputs, tuple(gate[i, None].clone() for gate in gates))
                for i, (state, tail, inputs) in enumerate(each)]
        return StepOutput(*map(torch.cat, zip(*done, strict=True)))

    def scan(self, request: int, conv_in: torch.Tensor, gates: Gates, moves: torch.Tensor) -> torch.Tensor:
        """Run the recurrence over many tokens of one request, and return their outputs. moves: a tensor with one bool,
        whether the new state is kept."""
        count, targets = conv_in.shape[0], self.targets
        mine = [] if targets is None else sorted(
            (offset, i) for owner, i, offset in targets.scans if owner == request and 0 < offset <= count
        )
        done = self.mixer.scan(self.state[request], self.tail[request], conv_in, gates, [o for o, _ in mine],
                               self.exact)
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


class TorchStep(RecurrentStep):
    def __init__(self, layers: TorchRecurrent, counts: StepCounts) -> None:
        super().__init__(layers, counts)
        self._is_live = counts.num_known > 0
        self._starts = counts.query_starts[:-1]
        from_tokens = layers.scan_from_tokens
        self._most_short = max((n for n in counts.known_lens if n < from_tokens), default=0)
        host_starts = list(accumulate(counts.query_lens, initial=0))
        self._slices = [(i, slice(host_starts[i], host_starts[i] + n))
                       for i, n in enumerate(counts.known_lens) if n >= from_tokens]
        # [requests] known tokens that are computed one by one, together with those of the other requests.
        lens = torch.where(self._is_live, counts.num_known, 0)
        self._short_lens = torch.where(lens < from_tokens, lens, 0)
        if counts.targets is not None and self.written is not None:
            for request, target, offset in counts.targets.scans:  # a boundary that the scan will not stop at
                computed, boundary = counts.computed[request], counts.targets.boundary[target]
                self.written[target] &= (boundary <= computed) | (computed + offset == boundary)

    def run(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        counts, rows, mixer = self.counts, self.layers.rows[layer], self.layers.mixers[layer]
        at_row = counts.rows
        walk = Walk(mixer, RecurrentState(rows.state[at_row], rows.tail[at_row]), counts.computed - counts.pending,
                    counts.targets, exact=self.layers.exact)
        # Requests without a token at a place write their outputs to an additional last row, which is dropped.
        out = conv_in.new_zeros(conv_in.shape[0] + 1, mixer.spec.out_dim)
        for j in range(counts.most_pending):
            walk.step(rows.conv_in[at_row, j], tuple(gate[at_row, j] for gate in rows.gates),
                      self._is_live & (j < counts.pending))
        for j in range(self._most_short):
            self._step(walk, out, conv_in, gates, self._starts + j, j < self._short_lens)
        for request, own in self._slices:
            moves = self._is_live[request]
            y = walk.scan(request, conv_in[own], tuple(gate[own] for gate in gates), moves)
            out[own] = torch.where(moves, y, 0)
        rows.state.index_copy_(0, at_row, walk.state)  # those that did not move write back what they hold
        rows.tail.index_copy_(0, at_row, walk.tail)
        if counts.targets is not None:
            self.layers.pages.write(layer, walk.saved, counts.targets.pages, walk.has_saved)
            walk.targets = None  # drafts never reach a checkpoint
        drafts = self._starts + counts.num_known
        for j in range(counts.most_drafts):
            self._step(walk, out, conv_in, gates, drafts + j, j < counts.num_drafts)
        self._keep_window(rows, conv_in, gates)
        return out[:-1]

    def _step(self, walk: Walk, out: torch.Tensor, conv_in: torch.Tensor, gates: Gates, token_rows: torch.Tensor,
              moves: torch.Tensor) -> None:
        """Compute one token of every request that moves, at these token rows."""
        dump = out.shape[0] - 1
        source = token_rows.clamp_max(dump - 1)
        y = walk.step(conv_in[source], tuple(gate[source] for gate in gates), moves)
        out.index_copy_(0, torch.where(moves, token_rows, dump), selected(moves, y, torch.zeros_like(y)))

    def _keep_window(self, rows: LayerRows, conv_in: torch.Tensor, gates: Gates) -> None:
        """Store the drafts' inputs, as they are before the convolution. A row that has ended keeps its old inputs,
        which are still to be folded."""
        counts, width = self.counts, self.counts.most_drafts
        if width == 0:
            return
        index = torch.arange(width, device=conv_in.device)
        source = ((self._starts + counts.num_known)[:, None] + index).clamp_max(conv_in.shape[0] - 1)
        for window, inputs in zip((rows.conv_in, *rows.gates), (conv_in, *gates), strict=True):
            kept = window[counts.rows][:, :width]
            fresh = selected(self._is_live, inputs[source].to(window.dtype), kept)
            window[:, :width].index_copy_(0, counts.rows, fresh)


def selected(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return `new` where mask [n] is True and `old` elsewhere; both [n, ..]."""
    return torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old)
