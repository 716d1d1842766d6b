"""ProposalChoice: chooses between drafters for each request. It takes the proposal with the most drafts that will
probably be accepted.

Every drafter proposes for every request. Each proposal is compared with the tokens that the next step yields, also if
another proposal was checked: its leading drafts that equal these tokens would have been accepted. This gives each
drafter a rate of accepted drafts for the request. The rate predicts how many drafts of a proposal will be accepted, and
the proposal with the largest number is chosen. If numbers are equal, the drafter that comes first in the list wins. A
new request begins with equal rates.

So a drafter that is right more often for a request is chosen within a few steps, and no step is spent on trying the
others. All of this is computed on the device, by row, so steps can be captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core import Admission, Axis, Limits
from outrider.drafters.base import Step
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.step import Proposal

DECAY = 0.9  # factor on a row's counts, per graded proposal
PRIOR_WEIGHT = 2.0  # drafts that the first guess of a rate is worth
PRIOR_RATE = 0.7
MOST_RATE = 0.99


class _Grades:
    """The quality of one drafter in every row: its last proposal, and decaying counts of tried drafts and right
    drafts."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.tokens = buffer(limits, Axis.ROWS, Axis.DRAFTS, dtype=torch.int64, device=device)
        self.counts = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)  # of drafts that wait for a grade
        self.tried = buffer(limits, Axis.ROWS, dtype=torch.float32, device=device)
        self.right = buffer(limits, Axis.ROWS, dtype=torch.float32, device=device)

    def grade(self, rows: torch.Tensor, run: torch.Tensor, run_len: torch.Tensor) -> None:
        """Compare the last proposals with the tokens that a step yielded, and update the counts of right drafts. run:
        [requests, tokens] the tokens; run_len: [requests] their number."""
        width = min(self.tokens.shape[1], run.shape[1])
        counts, columns = self.counts[rows], torch.arange(width, device=rows.device)
        is_known = columns < torch.minimum(counts, run_len)[:, None]
        is_right = ((self.tokens[rows, :width] == run[:, :width]) & is_known).long().cumprod(dim=1).sum(dim=1)
        num_tried = torch.minimum(torch.minimum(is_right + 1, counts), run_len)
        fading = torch.where(num_tried > 0, DECAY, 1.0)
        self.tried.index_copy_(0, rows, self.tried[rows] * fading + num_tried)
        self.right.index_copy_(0, rows, self.right[rows] * fading + is_right)
        self.counts.index_copy_(0, rows, torch.where(run_len > 0, 0, counts))

    def expected(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return [requests] the expected number of accepted drafts, if the drafter proposes `counts` drafts for these
        rows."""
        rate = (self.right[rows] + PRIOR_WEIGHT * PRIOR_RATE) / (self.tried[rows] + PRIOR_WEIGHT)
        rate = rate.clamp_max(MOST_RATE)
        return rate * (1 - rate ** counts.clamp_min(0)) / (1 - rate)

    def keep(self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        self.tokens.index_put_((rows[:, None], torch.arange(tokens.shape[1], device=rows.device)), tokens)
        self.counts.index_copy_(0, rows, counts)

    def forget(self, rows: torch.Tensor) -> None:
        for tensor in (self.counts, self.tried, self.right):
            tensor.index_fill_(0, rows, 0)


class ProposalChoice:
    def __init__(self, num_drafters: int, limits: Limits, device: torch.device) -> None:
        self._drafters = [_Grades(limits, device) for _ in range(num_drafters)]
        self._vocab_size, self._device = limits.vocab_size, device

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Forget the grades of rows that new requests have taken."""
        if admissions:
            rows = to_device([admission.row for admission in admissions], torch.int64, self._device)
            for own in self._drafters:
                own.forget(rows)

    def skip(self, step: Step) -> None:
        """Note a step without proposals. Its tokens grade the proposals of the previous step; the next step has none to
        grade."""
        self._grade(step)

    def choose(self, step: Step, proposals: Sequence[Proposal], is_on: torch.Tensor) -> list[Proposal]:
        """Choose for each request the drafter from which most drafts are expected to be accepted, the first of equals.
        The request's drafts from other drafters are removed. Invalid proposals stay unchanged, so that they are
        reported. is_on: [drafters] 0 for a drafter that is switched off."""
        self._grade(step)
        rows, num_wanted = step.batch.padded.rows, proposals[0].tokens.shape[1]
        columns = torch.arange(num_wanted, device=rows.device)
        gains, sound = [], []
        for index, (own, (tokens, counts, _)) in enumerate(zip(self._drafters, proposals, strict=True)):
            is_wrong = (columns < counts[:, None]) & ((tokens < 0) | (tokens >= self._vocab_size))
            is_sound = (counts >= 0) & (counts <= num_wanted) & ~is_wrong.any(dim=1)
            is_offered = is_sound & (counts > 0) & (is_on[index] > 0) & step.goes_on
            gains.append(torch.where(is_offered, own.expected(rows, counts), -1.0))
            sound.append(is_sound)
            own.keep(rows, tokens, torch.where(is_offered, counts, 0))
        best = torch.stack(gains).argmax(dim=0)
        return [Proposal(tokens, torch.where(is_sound & (best != index), 0, counts), levels)
                for index, ((tokens, counts, levels), is_sound) in enumerate(zip(proposals, sound, strict=True))]

    def _grade(self, step: Step) -> None:
        rows, accepted = step.batch.padded.rows, step.accepted
        for own in self._drafters:
            own.grade(rows, accepted.run, accepted.run_len)
