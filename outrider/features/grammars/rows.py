"""GrammarRows: the grammar matchers of batch rows with structured outputs, and the token masks that they make for a
step.

Matchers live in the worker, next to the device: a mask depends on the tokens of the previous step and on the drafts of
this one, which the device knows first. Grammars are compiled before their requests are accepted, so no step compiles
any; an admission names its grammar by number. After drafts a matcher is rolled back, so its state contains accepted
tokens only. A row that is admitted again begins from the outputs that its admission brings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from outrider.core import Admission, Axis, Finish, HostDraft, Limits, ScheduledBatch, StepForm, StepResult
from outrider.core.params import SamplingParams
from outrider.features.grammars.form_lease import FormFailure, FormLease
from outrider.features.grammars.turn_times import TOO_SLOW, RowTime, TurnTimes
from outrider.runner.host_turn import HostTurn
from outrider.runner.rank_link import ONE_RANK_LINK, RankLink
from outrider.runner.row_state import RowState
from outrider.runner.row_texts import RowText, read_later

log = logging.getLogger("outrider")


class Matcher(Protocol):
    """Follows one output through its grammar."""

    @property
    def error(self) -> str | None: ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow tokens that are a permanent part of the output."""

    def allowed_prefix(self, drafts: Sequence[int]) -> list[int]:
        """Return the longest beginning of the drafts that the grammar allows and after which the text goes on."""

    def guess(self, drafts: Sequence[int], most: int) -> list[int]:
        """Return at most `most` drafts: first the given drafts up to the first one that the grammar forbids, then the
        tokens that the grammar forces."""


class Forms(Protocol):
    """The compiled grammars of a worker. Makes matchers, and fills the masks of several at once."""

    def start(self, number: int) -> Future[Any]:
        """Make a matcher of the compiled grammar of this number on another thread. The matcher stands at the start of
        its text."""

    def fill(self, wanted: Sequence[tuple[Any, list[int], int]], masks: np.ndarray) -> None:
        """Fill token masks. Each matcher fills the mask at its index, and one more for each of its drafts."""


class DeadMatcher:
    """Replaces a matcher that could not be made on some rank, or that takes too long. It allows no token, so the
    request ends with `error`."""

    def __init__(self, error: str) -> None:
        self.error: str | None = error

    def advance(self, token_ids: Sequence[int]) -> None: ...

    def allowed_prefix(self, drafts: Sequence[int]) -> list[int]:
        return []

    def guess(self, drafts: Sequence[int], most: int) -> list[int]:
        return []


@dataclass
class RowGrammar:
    """The grammar of the request in a row, and the number of tokens that its matcher has followed."""

    params: SamplingParams
    started: Future[Matcher]
    outputs: list[int]  # tokens that were out when the request took the row
    prompt_len: int
    known: int  # tokens, prompt included, that the matcher has followed
    stop_ids: list[int]
    client: str | None  # who sent the request; None: the program itself
    seconds: float = 0.0  # processor time of the matcher since the last turn
    failure: FormFailure | None = None  # why it allows no further token, once it does not
    link: RankLink = ONE_RANK_LINK

    @cached_property
    def matcher(self) -> Matcher:
        """The row's matcher. Waits until it has been made from the compiled grammar. If that failed on one rank, all
        ranks use a DeadMatcher, since all must sample the same tokens."""
        error = self.started.exception()
        for own in self.link.gather(None if error is None else str(error)):
            if own is not None:
                return DeadMatcher(own)
        matcher = self.started.result()
        matcher.advance(self.outputs)
        return matcher

    def end(self, error: str) -> None:
        """Let the request end with an error at its next token."""
        self.__dict__["matcher"] = DeadMatcher(error)

    def forbids_end_at(self, length: int) -> bool:
        """Whether ignore_eos or min_tokens forbids an end of the text at this length (prompt included). The caller
        must still allow an end where the grammar allows nothing else."""
        return self.params.ignore_eos or length - self.prompt_len < self.params.min_tokens


class GrammarRows(HostTurn):
    name = "grammars"

    def __init__(self, state: RowState, limits: Limits, forms: Forms, link: RankLink = ONE_RANK_LINK) -> None:
        self._state, self._forms, self._link = state, forms, link
        self._times = TurnTimes()
        self._max_drafts, self._run = limits.max_drafts, limits.extent(Axis.RUN)
        self._rows: dict[int, RowGrammar] = {}
        self._guesses: list[HostDraft] = []  # for the next step
        self._read: Callable[[], list[RowText]] = list  # texts of the step's rows, as they are before its forward

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._rows.pop(admission.row, None)
            self._guesses = [guess for guess in self._guesses if guess.row != admission.row]
            params, lease = admission.params, admission.request.part(FormLease)
            if lease is not None:
                self._rows[admission.row] = RowGrammar(
                    params, self._forms.start(lease.number), list(admission.output_ids), admission.prompt_len,
                    admission.num_known, admission.request.stop_ids(admission.eos_ids), lease.client,
                    link=self._link)

    def reset(self) -> None:
        self._rows.clear()
        self._guesses = []

    # One step, in order

    def prepare(self, batch: ScheduledBatch) -> None:
        """Store the tokens that grammars force as drafts. Then request a copy of the rows' last tokens and drafts,
        which the device makes when the previous step is over."""
        if batch.mode.form is not StepForm.SPLIT:
            return
        self._state.take_host_drafts(self._guesses, keeps_longer=True)
        self._guesses = []
        self._read = read_later(self._state, [row for row, _ in self._drafting(batch)], self._run)

    def turn(self, batch: ScheduledBatch, *, runs_ahead: bool) -> None:
        """Called in a split step between the forward pass and the sampler. Matchers follow the tokens of the previous
        step, then write the masks of this step's logit rows. No masks are written after the first draft that is not
        allowed, because no token is sampled there."""
        followed: list[tuple[int, RowText, list[int]]] = []  # with the drafts that grammars allow
        for (row, num_drafts), text in zip(self._drafting(batch), self._read(), strict=True):
            if text.is_alive:
                self._follow(row, text)
                with self._timed(row) as grammar:
                    followed.append((row, text, grammar.matcher.allowed_prefix(text.drafts[:num_drafts])))
        if followed:
            self._end_slow([row for row, _, _ in followed])
            self._write_masks(followed)
        if runs_ahead:
            num_drafts_of = dict(self._drafting(batch))
            for row, text, _ in followed:
                self._guess(row, text.known, text.drafts[:num_drafts_of[row]], self._run)

    def settle(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Called after a split step whose result can be read at once. Returns the result with new counts of waiting
        drafts, because grammars have removed some drafts and added others."""
        rows, counts = [row for row, _ in self._drafting(batch)], {}
        for row, text in zip(rows, read_later(self._state, rows, self._run)(), strict=True):
            if text.is_alive:
                self._follow(row, text)
                counts[row] = self._guess(row, text.known, text.drafts)
        self._state.take_host_drafts(self._guesses)
        self._guesses = []
        parts = [part._replace(num_proposed=counts.get(row, part.num_proposed))
                 for part, row in zip(result.requests, batch.rows, strict=True)]
        return replace(result, requests=parts)

    def explain(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Add the error messages of grammars to the result of a split step. The device knows only that no token was
        allowed."""
        owners = ((row, self._rows.get(row)) for row in batch.rows)
        failures = {row: own.failure for row, own in owners if own is not None and own.failure is not None}
        if not failures:
            return result
        parts = [part._replace(error=failures[row]) if part.finish is Finish.ERROR and row in failures else part
                 for part, row in zip(result.requests, batch.rows, strict=True)]
        return replace(result, requests=parts)

    # Inside

    def _drafting(self, batch: ScheduledBatch) -> list[tuple[int, int]]:
        """Return (row, scheduled drafts) of each request that samples by a grammar."""
        parts = zip(batch.rows, batch.num_drafts, batch.samples, strict=True)
        return [(row, num_drafts) for row, num_drafts, samples in parts if samples and row in self._rows]

    def _follow(self, row: int, text: RowText) -> RowGrammar:
        grammar = self._rows[row]
        num_new = text.known - grammar.known
        assert 0 <= num_new <= len(text.last), f"{num_new} tokens since the last step, more than one can yield"
        matcher = grammar.matcher  # not timed: the first time it follows all outputs of a request that was preempted
        with self._timed(row):
            matcher.advance(text.last[len(text.last) - num_new :])
        grammar.known = text.known
        return grammar

    @contextmanager
    def _timed(self, row: int) -> Iterator[RowGrammar]:
        grammar, began = self._rows[row], time.thread_time()
        yield grammar
        grammar.seconds += time.thread_time() - began

    def _end_slow(self, rows: Sequence[int]) -> None:
        """End the requests whose grammars take too long. Rank 0 decides, because clocks of ranks differ."""
        times = {row: RowTime(self._rows[row].client, self._rows[row].seconds) for row in rows}
        for row in self._link.decide(lambda: self._times.find_slow(times)):
            self._rows[row].end(TOO_SLOW)
        for row in rows:
            self._rows[row].seconds = 0.0

    def _guess(self, row: int, known: int, drafts: list[int], in_flight: int = 0) -> int:
        """Make drafts for the next step. `in_flight`: the most tokens that this step may yield, which come before the
        drafts. Returns the number of drafts that will wait in the row."""
        grammar, most = self._rows[row], self._max_drafts
        if grammar.params.max_drafts is not None:
            most = min(most, grammar.params.max_drafts)
        with self._timed(row):
            guess = grammar.matcher.guess(drafts, most + in_flight) if most else []
        if guess != drafts[: len(guess)]:
            self._guesses.append(HostDraft(row, known, guess))
        return min(most, len(guess))

    def _write_masks(self, followed: Sequence[tuple[int, RowText, list[int]]]) -> None:
        wanted: list[tuple[Matcher, list[int], int]] = []
        cells: list[int] = []
        lengths: list[tuple[RowGrammar, int]] = []  # length of the text before each mask
        for row, text, drafts in followed:
            grammar = self._rows[row]
            if grammar.matcher.error is None:
                wanted.append((grammar.matcher, drafts, len(cells)))
            cells += range(row * self._run, row * self._run + 1 + len(drafts))
            lengths += [(grammar, text.known + j) for j in range(1 + len(drafts))]
        self._write(wanted, cells, lengths)

    def _write(self, wanted: list[tuple[Matcher, list[int], int]], cells: list[int],
               lengths: list[tuple[RowGrammar, int]]) -> None:
        masks = np.zeros((len(cells), self._state.sampling.masks.num_words), dtype=np.int32)
        self._forms.fill(wanted, masks)
        for mask, (grammar, length) in zip(masks, lengths, strict=True):
            if grammar.forbids_end_at(length):
                _leave_out(mask, grammar.stop_ids)
            if grammar.matcher.error is not None and grammar.failure is None:
                grammar.failure = FormFailure.from_matcher(grammar.matcher.error)
                log.warning("a request ends, because of its grammar: %s", grammar.failure)
        self._state.sampling.masks.write(cells, masks)


def _leave_out(mask: np.ndarray, ids: list[int]) -> None:
    """Clear the bits of these tokens in a mask. If no bit would be left, the mask stays as it is: the grammar is then
    complete, and the request ends."""
    words, bits = np.array(ids) // 32, np.uint32(1) << (np.array(ids, dtype=np.uint32) % np.uint32(32))
    left = mask.view(np.uint32).copy()
    np.bitwise_and.at(left, words, ~bits)
    if left.any():
        mask[:] = left.view(np.int32)
