"""SimulatedDevice: answers batches like a worker, with made-up tokens.

Every token of an output is unique, so a prefix hit occurs only where prompts are equal. Whether a draft is accepted is
random, and depends only on the seed, the request and the position. How tokens are divided into steps has no influence.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import Admission, Finish, RequestResult, ScheduledBatch, StepResult

POSITION_BITS = 24  # a token is the number of its request and its position
MASK = (1 << 64) - 1


class SimulatedRow:
    """The state of one request on the device."""

    __slots__ = ("known", "computed", "max_len", "num_proposed", "num_folded")

    def __init__(self, admission: Admission) -> None:
        self.known, self.computed, self.max_len = admission.num_known, admission.computed, admission.max_len
        self.num_proposed = 0
        self.num_folded = admission.computed  # tokens that recurrent states have seen


class SimulatedDevice:
    def __init__(self, rates: Sequence[float], seed: int) -> None:
        """rates: for each draft position, the probability that a draft is accepted if all drafts before it were.
        Positions after the last entry use the last rate."""
        self._thresholds = [int(rate * (1 << 32)) for rate in rates]
        self._seed = seed
        self._rows: dict[int, SimulatedRow] = {}

    def run(self, batch: ScheduledBatch) -> StepResult:
        for admission in batch.admissions:
            self._rows[admission.row] = SimulatedRow(admission)
        written = [fold.id for fold in batch.cache.folds]
        for write in batch.cache.checkpoints:
            row, known = self._rows[write.row], batch.num_known[batch.rows.index(write.row)]
            if row.num_folded < write.boundary <= row.computed + known:
                written.append(write.id)
        parts = zip(batch.request_ids, batch.epochs, batch.rows, batch.num_known, batch.num_drafts, batch.samples,
                    strict=True)
        results = [self._advance(batch.drafting.num_wanted, *part) for part in parts]
        return StepResult(batch.step, results, checkpoints=written)

    def skip(self, rows: Sequence[int], num_steps: int) -> None:
        """Simulate `num_steps` decode steps without drafts for each row at once."""
        for index in rows:
            row = self._rows[index]
            row.known += num_steps
            row.computed += num_steps
            row.num_folded = row.computed

    def _advance(self, num_wanted: int, request_id: int, epoch: int, index: int, num_known: int, num_drafts: int,
                 samples: bool) -> RequestResult:
        row = self._rows[index]
        if row.known >= row.max_len:  # ended in a step before this one
            return RequestResult(request_id, epoch, [], 0, 0, 0)
        row.num_folded = row.computed + num_known
        if not samples:
            row.computed += num_known
            return RequestResult(request_id, epoch, [], num_known, 0, 0)
        known = row.known
        alive = min(num_drafts, row.num_proposed)
        accepted = min(self._accept(request_id, known, alive), row.max_len - known - 1) if alive else 0
        row.computed += num_known + accepted
        row.known = end = known + accepted + 1
        row.num_proposed = num_wanted
        first = request_id << POSITION_BITS
        finish = Finish.LENGTH if end >= row.max_len else Finish.NO
        return RequestResult(request_id, epoch, list(range(first + known, first + end)), num_known + accepted, alive,
                             accepted, num_wanted, finish)

    def _accept(self, request_id: int, position: int, most: int) -> int:
        """Return how many of at most `most` drafts are accepted. position: the position of the first draft in its
        request."""
        for index in range(most if self._thresholds else 0):
            threshold = self._thresholds[min(index, len(self._thresholds) - 1)]
            if random_bits(self._seed, request_id, position + index) >= threshold:
                return index
        return most if self._thresholds else 0


def random_bits(seed: int, request_id: int, position: int) -> int:
    """Return 32 random bits that depend only on the arguments (splitmix64)."""
    value = (seed * 0xD1342543DE82EF95 + request_id * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return (value ^ (value >> 31)) >> 32


def tokens_of(request_id: int, start: int, end: int) -> range:
    """Return the tokens of a request at positions [start, end) of its prompt and output. No other request has the same
    tokens."""
    first = request_id << POSITION_BITS
    return range(first + start, first + end)


def prefix_tokens(prefix: int, length: int) -> range:
    """Return the tokens of a prefix that several requests share. They are negative, so they differ from all other
    tokens."""
    first = -((prefix + 1) << POSITION_BITS)
    return range(first, first + length)
