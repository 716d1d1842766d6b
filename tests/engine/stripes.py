"""A grammar that needs no library: which token may stand where depends on its place in the text alone.

Place i takes the tokens t with t % 4 == i % 4; of every six places the last three take one token each; after `length`
tokens the text ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from outrider.core import Limits
from outrider.core.feature_parts import RequestPart
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeeper
from outrider.core.structured import StructuredOutputsParams
from outrider.engine.engine import Engine
from outrider.engine.engine_feature import Caller, EngineFeature, EngineTools
from outrider.features.grammars.form_lease import FormLease
from outrider.features.grammars.leases import FormLeases
from outrider.features.grammars.rows import GrammarRows
from outrider.models.base import Model
from outrider.runner.step import DeviceStep
from outrider.runner.worker import Worker
from outrider.runner.worker_feature import WorkerFeature

FORM = StructuredOutputsParams(regex="stripes")


class StripeMatcher:
    error: str | None = None

    def __init__(self, grammars: StripeGrammars) -> None:
        self.grammars, self.place = grammars, 0

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert token in self.grammars.allowed(self.place), f"token {token} at place {self.place}"
            self.place += 1

    def allowed_prefix(self, drafts: Sequence[int]) -> list[int]:
        count = 0
        while count < len(drafts) and self.place + count < self.grammars.length:
            if drafts[count] not in self.grammars.allowed(self.place + count):
                break
            count += 1
        return list(drafts[:count])

    def guess(self, drafts: Sequence[int], most: int) -> list[int]:
        found = self.allowed_prefix(drafts)[:most]
        while len(found) < most and len(forced := self.grammars.allowed(self.place + len(found))) == 1:
            found.append(forced[0])
            if self.place + len(found) > self.grammars.length:
                break
        return found


class StripeGrammars:
    def __init__(self, vocab: int, length: int, end: int) -> None:
        self.vocab, self.length, self.end = vocab, length, end
        self.num_masks = 0
        self.leases = FormLeases(lambda number: None)

    def allowed(self, place: int) -> list[int]:
        if place >= self.length:
            return [self.end]
        if place % 6 >= 3:
            return [(7 * place + 5) % self.vocab]
        return list(range(place % 4, self.vocab, 4))

    def lease(self) -> FormLease:
        return self.leases.take(b"stripes", None) or self.leases.keep(b"stripes", 0, 0, None)

    def start(self, number: int) -> Future[StripeMatcher]:
        started: Future[StripeMatcher] = Future()
        started.set_result(StripeMatcher(self))
        return started

    def fill(self, wanted: Sequence[tuple[StripeMatcher, list[int], int]], masks: np.ndarray) -> None:
        for matcher, drafts, index in wanted:
            for j in range(1 + len(drafts)):
                bits = np.zeros(32 * masks.shape[1], dtype=bool)
                bits[self.allowed(matcher.place + j)] = True
                masks[index + j] = np.packbits(bits, bitorder="little").view(np.int32)
                self.num_masks += 1

    def serve(self, engine: Engine, worker: Worker) -> None:
        """Take the place of the grammars of an engine."""
        worker._late.put("grammars", _OnDevice(self))
        engine.checks.features.put("grammars", _InEngine(self))


class _OnDevice(WorkerFeature):
    def __init__(self, grammars: StripeGrammars) -> None:
        self._grammars = grammars

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        step.take_turns(GrammarRows(step.state, limits, self._grammars, step.ranks.link))


class _InEngine(EngineFeature):
    def __init__(self, grammars: StripeGrammars) -> None:
        self._grammars = grammars

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart]:
        return self._grammars.lease

    def make_keeper(self, tools: EngineTools) -> RequestKeeper:
        return self._grammars.leases
